"""Experiments with the survey's operators on this machine, for `orchestray lab`: each compares ways that give the same.

A ratio holds for this machine and these sizes. Ways are timed in turns, and a number is the median of the rounds.
"""
