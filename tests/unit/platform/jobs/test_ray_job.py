from __future__ import annotations

from pathlib import Path

from orchestray.platform.jobs.ray_job import WorkerPods, ray_job

_LONG = f"{'folder/' * 40}points.csv"


def test_each_file_has_a_key_of_its_own_of_a_length_that_kubernetes_takes(tmp_path: Path) -> None:
    # The third is renamed, and a file has that name already.
    names = ["2-a-b.py", "a b.py", "a-b.py", "a/b.py", "run.sh", _LONG, _LONG.replace("/points", "/ points")]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n", encoding="utf-8")
    pods = WorkerPods(count=1, processes=1, cpus=1.0, gpus=0.0)
    config, job = ray_job("a", ["train", "a.yaml"], {name: tmp_path / name for name in names}, pods, image="x")
    volumes = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"]
    [items] = [volume["configMap"]["items"] for volume in volumes if "configMap" in volume]
    written = {item["path"]: config["data"][item["key"]] for item in items}
    assert {name: written[f"files/{name}"] for name in names} == {name: f"# {name}\n" for name in names}
    assert max(map(len, config["data"])) <= 253
