"""A fleet on a Ray cluster of two nodes, one of which is killed at work."""

import json
import threading
import time
from pathlib import Path

import pytest

from auditor.fleet import FleetTarget, run_all

ray = pytest.importorskip("ray")

MODEL = """
import pathlib, time
import torch
from torch import nn

pathlib.Path(__file__).with_name(f"begun_{time.time_ns()}").touch()
time.sleep(3)


def get_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def get_inputs():
    return torch.ones(2, 8)
"""


@pytest.fixture
def cluster(monkeypatch):
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield made, made.add_node(num_cpus=2)
    made.shutdown()


@pytest.mark.slow
def test_a_killed_node_costs_no_audit(cluster, tmp_path):
    nodes, second = cluster
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    names = ["a", "b", "c", "broken", "d"]
    words = {
        name: ("--quick", "--model-explorer", f"{'missing' if name == 'broken' else 'model'}.py") for name in names
    }
    tasks = [FleetTarget(name, words[name], tmp_path, tmp_path / "out" / name, retries=2) for name in names]

    def kill() -> None:
        while len([*tmp_path.glob("begun_*")]) < 2:
            time.sleep(0.1)
        nodes.remove_node(second, allow_graceful=False)

    killer = threading.Thread(target=kill)
    killer.start()
    ends = {}
    run_all(tasks, 1, nodes.address, lambda task, ended: ends.update({task.name: ended}))
    killer.join()
    assert {name: not ended.said for name, ended in ends.items()} == {name: name != "broken" for name in names}
    assert "missing.py does not exist" in ends["broken"].said
    for name in ("a", "b", "c", "d"):
        plan = json.loads((tmp_path / "out" / name / "plan.json").read_text())
        assert plan["recommended"]
        assert any((tmp_path / "out" / name / "model_explorer").iterdir())
