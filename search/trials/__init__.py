"""The programs that trials run: training in parts, with a state that can be handed to another trial."""
