"""A cluster of several nodes (on this machine): who goes where, and a node that is lost."""

from __future__ import annotations

import time

import pytest
import torch

from kedge.ext.ray import LaunchLimits, launch
from kedge.ext.ray.placement import place, plan_bundles
from kedge.records.errors import ConfigError
from tests.on_ray.clusters import needs_ray
from tests.on_ray.jobs import Train

pytestmark = needs_ray


@pytest.fixture(scope="module")
def nodes():
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=2)
    ray.init(address=made.address, configure_logging=False, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def where(placement):
    """The node of every bundle."""
    from ray.util import placement_group_table

    table = placement_group_table(placement.group)["bundles_to_node_id"]
    return [table[i] for i in range(len(placement.bundles))]


def wait_until_free(cpus):
    """Ray takes back what a run had a moment after it has ended."""
    import ray

    until = time.monotonic() + 60
    while ray.available_resources().get("CPU") != cpus and time.monotonic() < until:
        time.sleep(0.1)


def test_learners_of_two_nodes_are_on_two_nodes_and_train_as_on_one(nodes, tmp_path, capsys):
    calm = {"adam_epsilon": 1e-3, "learning_rate": 1e-3}  # rounding stays small
    options = {"max_lag": 1, **calm}
    job = Train(options=options | {"output_dir": str(tmp_path / "two")}, engine="ray")
    limits = LaunchLimits(placement=10)
    found, moved = launch(job, learners=[1, 1], engines=2, limits=limits)
    wait_until_free(4)
    placement = place(plan_bundles(learners=[1, 1]), wait_seconds=10)
    found_on = where(placement)
    placement.release()
    assert len(set(found_on)) == 2
    assert len(found) == 4
    assert capsys.readouterr().out.count("learner") == 2
    here = {"output_dir": str(tmp_path / "one"), "per_device_train_batch_size": 8}
    one, others = Train(options=options | here, engine="here")()
    names = ("objective/scores", "objective/kl", "loss/policy_avg", "rollout/lag")
    for a, b in zip(found, one, strict=True):
        assert [a[n] for n in names] == pytest.approx([b[n] for n in names], rel=1e-3, abs=1e-4)
    assert all(torch.allclose(x, others[name], atol=1e-4) for name, x in moved.items())


def test_a_bundle_larger_than_any_node_is_said_to_be(nodes):
    wait_until_free(4)
    begin = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        place(plan_bundles(learners=[3]), wait_seconds=1.0)
    assert time.monotonic() - begin < 60
    assert "CPU: 3 requested, 4 in the cluster, 4 free" in str(caught.value)
    assert "bundle 0 does not fit on any node; the largest has CPU 2" in str(caught.value)
