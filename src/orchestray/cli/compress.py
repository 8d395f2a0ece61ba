"""`orchestray compress`: a trained model made smaller, as a run that is served and evaluated like any other."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestray.cli.options import DEFAULT_RUNS_DIR, Address, Json, RunsDir

app = typer.Typer()


@app.command(epilog="Example: orchestray compress digits-cnn --sparsity 0.9 --bits 4 --fine-tune 400")
def compress(
    name: Annotated[str, typer.Argument(metavar="RUN", help="The run's name, or its directory.", show_default=False)],
    *,
    sparsity: Annotated[
        float, typer.Option("--sparsity", metavar="PART", help="Part of the weights that is pruned, the smallest ones.")
    ] = 0.9,
    bits: Annotated[
        int, typer.Option("--bits", metavar="N", help="Bits of a weight's code: 2^N values in each tensor, 1 to 8.")
    ] = 5,
    tucker: Annotated[
        float | None,
        typer.Option(
            "--tucker", metavar="PART", help="Tucker factors for convolutions, with this part of the channels."
        ),
    ] = None,
    fine_tune: Annotated[
        int,
        typer.Option(
            "--fine-tune", metavar="STEPS", help="Train so many steps after pruning, and after sharing values."
        ),
    ] = 0,
    new_name: Annotated[
        str | None,
        typer.Option("--name", metavar="NEW", help="Name of the run that is written; default: RUN-compressed."),
    ] = None,
    runs_dir: RunsDir = DEFAULT_RUNS_DIR,
    address: Address = None,
    as_json: Json = False,
) -> None:
    """Make a trained model smaller (Deep Compression): prune, share values, and Huffman-code what is left.

    The new run has model/model.huffman instead of model/model.safetensors. It is validated, and served as any run is.
    """
    from orchestray.trainers.saved.run import load_run

    run = load_run(name if "/" in name else runs_dir / name)
    from orchestray.trainers.driver.compressed_run import compress as write_compressed

    written = write_compressed(
        run,
        sparsity=sparsity,
        bits=bits,
        tucker=tucker,
        fine_tune=fine_tune,
        name=new_name,
        address=address,
    )
    if as_json:
        from orchestray.platform.run.files import dump_json

        print(dump_json({"name": written.name, "path": str(written.path), **written.result}))
        return
    from orchestray.platform.terminal.format import compressed_rows

    (_, smaller), *rows = compressed_rows(written.result["compressed"])
    print(f"{written.name}: {smaller}")
    for label, text in rows:
        print(f"{label:<16} {text}")
    print(f"Wrote {written.path}.")
