"""`jetrl bench`: our kernels beside the fastest BF16 ones of the same GPU, and beside the roofline.

    timing      CUDA events, graphs, rotation of inputs, interleaved sides     table     rows, targets, printing, JSON
    baseline    operators with cuBLAS and cuDNN in the place of ours            run       the command
    profiling   which kernels take the time                                     gemm, attention, layer, head   of operators
    rollout     the engine on a whole model

Each bench has pure functions from times to rows, which tests feed with times of their own, and `bench`, which measures.
"""
