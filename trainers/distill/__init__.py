"""Distillation: a network learns from the outputs of another one."""
