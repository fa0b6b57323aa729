"""The leading scheduler of a cluster rehearses adaptive models, and so does the scheduler that follows it."""
import concurrent.futures
import time

import pytest
import requests

from serving import EXAMPLES, processes
from test_ui import infer

# The rehearsal runs at idle priority: beside other programs a trial takes minutes.
WITHIN_S = 600
# Without a deadline there are no trials. On a busy machine some requests miss this one.
FLAGS = ("--slo-ms", "digits=2000")


@pytest.fixture
def cluster(binary, tmp_path):
    with processes(binary, EXAMPLES / "models", tmp_path, *FLAGS, models=["digits"], backends=2, frontends=1, engine="rten", spares=1) as all_of_it:
        yield all_of_it


def scheduler_of(process):
    reply = requests.get(f"{process.url}/v2/scheduler", timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def leader(schedulers):
    def leads(scheduler):
        return scheduler.process.poll() is None and requests.get(f"{scheduler.url}/v2/cluster", timeout=60).json()["leads"]

    deadline = time.monotonic() + WITHIN_S
    while not (leading := [scheduler for scheduler in schedulers if leads(scheduler)]):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return leading[0]


def ask_until_a_trial(frontend, scheduler):
    """Four clients ask until the scheduler has finished a trial. Returns its status."""
    deadline = time.monotonic() + WITHIN_S
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        while True:
            replies = list(pool.map(lambda _: infer(frontend), range(100)))
            assert {reply.status_code for reply in replies} <= {200, 504}
            status = scheduler_of(scheduler)
            if status["trials"]:
                return status
            assert time.monotonic() < deadline, status


@pytest.mark.timeout(3 * WITHIN_S)
def test_the_leader_rehearses_and_the_next_leader_rehearses_anew(cluster):
    schedulers, _, (frontend,) = cluster
    first = leader(schedulers)
    status = ask_until_a_trial(frontend, first)
    assert [(model["model"], model["by"]) for model in status["models"]] in ([("digits", "start_rule")], [("digits", "trial")])
    assert status["last_trial"]["candidates"] and status["cpu"]["budget"] == 0.05
    assert first.metric("downbeat_rehearsal_trials_total") >= status["trials"]
    (spare,) = [scheduler for scheduler in schedulers if scheduler is not first]
    assert scheduler_of(spare)["trials"] == 0 and scheduler_of(spare)["models"] == [], "a spare hears of no requests"
    first.kill()
    assert leader(schedulers) is spare
    assert ask_until_a_trial(frontend, spare)["models"][0]["model"] == "digits"
