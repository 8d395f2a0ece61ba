"""The code of users: which modules belong to a file of theirs, and their import under names of their own."""
