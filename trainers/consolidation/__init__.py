"""Consolidation: several trained models as one: ensembles, distillation, a shared trunk, averages of snapshots."""
