"""Jet-RL across machines: the only room that imports ray.

Empty so far. The loop talks to rollout and training through two small protocols; this room will implement them with
remote workers, so that neither the loop nor the engine nor the trainer learns where the other runs.
"""
