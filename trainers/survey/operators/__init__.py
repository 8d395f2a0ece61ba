"""The ways in which the survey computes an operator (sections 4.3 and 4.4), as readable functions of torch.

They serve as comparisons: each equals torch's own operator, and the counts of `trainers.analysis` are those of the
survey's tables. torch's kernels are faster nearly always.
"""
