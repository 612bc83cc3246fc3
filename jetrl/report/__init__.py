"""What a run leaves behind and how one sees it: record writes, read reads, display is live, page is the report.

This room reads and writes files and the terminal; it imports no torch.
"""
