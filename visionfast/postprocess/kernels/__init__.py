"""Post-processing on the GPU, in the Triton language: fixed shapes, fixed buffers, no word to the host in between.

`layout` says what the buffers hold, `detections` finds the objects, `masks` decodes their masks. The definitions
are the NumPy functions beside this folder, and the kernels give their results, ties included.
"""
