"""The commands, a module each, loaded when it is called.

A module has `app`, a `typer.Typer`: with one command in it that is the command, with several (or a callback) it is a
group of them. It imports torch, ray and their like inside functions only. Their table is in `platform/cli/app.py`.
"""
