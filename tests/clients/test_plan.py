"""`downbeat plan` of a build without the MILP solver, as releases are. The Rust tests have the solver in CI."""
import subprocess

from serving import EXAMPLES

ADVICE = "`cargo build --release --features highs` adds the MILP solver"


def plan(binary, *arguments):
    return subprocess.run([str(binary), "plan", *map(str, arguments)], capture_output=True, text=True, timeout=120)


def test_the_solver_that_is_missing_is_named(binary):
    refused = plan(binary, EXAMPLES / "workload.toml", "--method", "highs")
    assert refused.returncode == 1 and f"{ADVICE} HiGHS" in refused.stderr, refused


def test_a_plan_that_is_not_proved_says_what_would_prove_it(binary, tmp_path):
    workload = tmp_path / "workload.toml"
    model = "[[models]]\nname = 'm{0}'\nrate = {1}\nmemory_mib = {2}\nslo_ms = 25\nprofile = {{ alpha_ms = 1, beta_ms = 5 }}\n"
    models = [model.format(i, 1 + i * 37 % 101, 10 + i * 53 % 97) for i in range(40)]
    workload.write_text("sub_clusters = 3\n" + "".join(models))
    found = plan(binary, workload, "--time-limit", "1")
    assert found.returncode == 0 and ADVICE in found.stderr, found
    small = plan(binary, EXAMPLES / "workload.toml")
    assert (small.returncode, small.stderr) == (0, ""), "7 models: every partition is looked at"
