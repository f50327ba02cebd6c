"""What `benchmarks/gpu_check.py` is made of: the checks, and the few words that they need of a machine.

Nothing but `cuda_machine` says `torch.cuda`; `host_machine` speaks the same words on a machine without a GPU, so that
every line of the checks has run before they meet their first card.
"""
