"""Files for schedulers: every option is one the scheduler has, and what must agree across the file does."""

import os
import shlex
import subprocess
import sys

import pytest
import yaml

from launch.__main__ import main
from launch.manifests import GPU_ENVIRONMENT, Kubernetes, Order, Sky, Slurm, Tpu

RECIPE = "configs/tiny/grpo.yaml"
MESH = ("mesh.data=2", "mesh.fsdp=8")
IN_A_CLAIM = ("run_dir=/r/x", "--hosts", "2", "--image", "i", "--claim", "c")
# sbatch of Slurm 24.05: options that take a value, of those that matter to a job of this kind.
SBATCH = {
    "account", "array", "begin", "chdir", "comment", "constraint", "container", "cpus-per-gpu", "cpus-per-task",
    "dependency", "error", "exclude", "export", "gpus", "gpus-per-node", "gpus-per-task", "gres", "job-name",
    "mail-type", "mail-user", "mem", "mem-per-cpu", "mem-per-gpu", "nodelist", "nodes", "ntasks", "ntasks-per-node",
    "open-mode", "output", "partition", "qos", "reservation", "signal", "time", "time-min", "wckey",
}  # fmt: skip
# JobSet v1alpha2, Job v1 and Pod v1: fields this kind of job may have.
FIELDS = {
    "jobset": {"network", "replicatedJobs", "successPolicy", "failurePolicy", "startupPolicy", "suspend", "coordinator",
               "managedBy", "ttlSecondsAfterFinished"},
    "network": {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"},
    "failurePolicy": {"maxRestarts", "rules", "restartStrategy"},
    "job": {"parallelism", "completions", "completionMode", "backoffLimit", "podFailurePolicy", "template",
            "activeDeadlineSeconds", "suspend", "ttlSecondsAfterFinished"},
    "pod": {"restartPolicy", "terminationGracePeriodSeconds", "containers", "volumes", "nodeSelector", "tolerations",
            "serviceAccountName", "hostNetwork", "dnsPolicy"},
    "container": {"name", "image", "command", "args", "ports", "env", "resources", "volumeMounts", "workingDir",
                  "imagePullPolicy", "securityContext"},
    "sky": {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "volumes", "setup", "run",
            "config"},
    "sky resources": {"infra", "accelerators", "cpus", "memory", "instance_type", "use_spot", "disk_size", "disk_tier",
                      "network_tier", "image_id", "ports", "labels", "autostop", "any_of", "ordered", "job_recovery"},
}  # fmt: skip


def written(capsys, *words, code=0):
    assert main(words) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def test_a_batch_script_has_only_options_that_sbatch_knows(capsys):
    text = written(
        capsys, "slurm", RECIPE, *MESH, "run_dir=runs/Big One", "--hosts", "2", "--partition", "gpu", "--setup",
        "module load cuda",
    )  # fmt: skip
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    asked = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert lines[1 : len(asked) + 1] == [f"#SBATCH {option}" for option in asked]  # sbatch stops at the first command
    options = dict(option.removeprefix("--").split("=", 1) for option in asked)
    assert options.keys() <= SBATCH
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "1", "8")
    assert options["job-name"] == "big-one"
    assert "account" not in options
    assert lines.index("module load cuda") > len(asked)


def fake_cluster(tmp_path, codes):
    """`srun` that ends with these codes in turn, and writes down what it was given."""
    (tmp_path / "srun").write_text(
        f'#!/bin/bash\necho "$@" >> {tmp_path}/calls\nn=$(wc -l < {tmp_path}/calls)\n'
        f"codes=({' '.join(map(str, codes))})\nexit ${{codes[$((n-1))]}}\n"
    )
    (tmp_path / "srun").chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("codes", "code", "calls"), [([0], 0, 1), ([1, 137, 0], 0, 3), ([1, 1, 1], 1, 3), ([1, 2, 0], 2, 2)]
)
def test_a_batch_script_tries_again_unless_the_recipe_is_wrong(tmp_path, capsys, codes, code, calls):
    text = written(capsys, "slurm", RECIPE, *MESH, "run_dir=runs/a b", "--hosts", "2", "--max-restarts", "2")
    (tmp_path / "job.sh").write_text(text)
    done = subprocess.run(["bash", tmp_path / "job.sh"], env=fake_cluster(tmp_path, codes), check=False)
    assert done.returncode == code
    said = (tmp_path / "calls").read_text().splitlines()
    assert len(said) == calls
    assert said[0].startswith(f"--kill-on-bad-exit=1 python -m launch {RECIPE} mesh.data=2")
    assert shlex.quote("run_dir=runs/a b") in text


def test_a_jobset_hangs_together(capsys):
    words = ("--hosts", "2", "--image", "here/trainer:1", "--claim", "runs", "--max-restarts", "5")
    recipe, group = yaml.safe_load_all(written(capsys, "k8s", RECIPE, *MESH, "run_dir=/runs/grpo", *words))
    assert yaml.safe_load(recipe["data"]["recipe.yaml"])["mesh"]["fsdp"] == 8
    assert (group["apiVersion"], group["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    name, spec = group["metadata"]["name"], group["spec"]
    assert spec.keys() <= FIELDS["jobset"]
    assert spec["network"].keys() <= FIELDS["network"]
    assert spec["failurePolicy"].keys() <= FIELDS["failurePolicy"]
    assert spec["failurePolicy"]["maxRestarts"] == 5
    (hosts,) = spec["replicatedJobs"]
    job = hosts["template"]["spec"]
    assert job.keys() <= FIELDS["job"]
    assert (job["parallelism"], job["completions"], job["completionMode"], job["backoffLimit"]) == (2, 2, "Indexed", 0)
    pod = job["template"]["spec"]
    assert pod.keys() <= FIELDS["pod"]
    assert pod["restartPolicy"] == "Never"  # which a podFailurePolicy needs
    (container,) = pod["containers"]
    assert container.keys() <= FIELDS["container"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    coordinator, port = environment["JAX_COORDINATOR_ADDRESS"].split(":")
    assert coordinator == f"{name}-{hosts['name']}-0-0.{name}"  # JobSet's name of a pod's host
    assert {"containerPort": int(port)} in container["ports"]
    assert environment["JAX_NUM_PROCESSES"] == "2"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8} == container["resources"]["requests"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    configured = next(volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume)
    assert configured == recipe["metadata"]["name"]
    assert container["command"][-1] == "/recipe/recipe.yaml"


def test_a_tpu_slice_is_selected_by_its_labels(capsys):
    words = ("--hosts", "4", "--gpus-per-host", "4", "--image", "i", "--claim", "c", "--tpu", "tpu-v5p-slice:2x2x4")
    _, group = yaml.safe_load_all(written(capsys, "k8s", RECIPE, *MESH, "run_dir=/runs/x", *words))
    pod = group["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x2x4"
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    assert "XLA_FLAGS" not in {entry["name"] for entry in pod["containers"][0]["env"]}


def test_a_chip_of_two_devices_has_two_places_in_the_mesh(capsys):
    """JAX shows a tpu7x chip as two devices, as `launch plan` counts them; the cluster counts chips."""
    words = ("--hosts", "2", "--gpus-per-host", "4", "--image", "i", "--claim", "c", "run_dir=/runs/x")
    _, group = yaml.safe_load_all(written(capsys, "k8s", RECIPE, *MESH, *words, "--tpu", "tpu7x:2x2x2"))
    pod = group["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    assert "8 devices" in written(capsys, "k8s", RECIPE, *MESH, *words, "--tpu", "tpu-v5p-slice:2x2x2", code=2)


def test_a_sky_task_tells_each_node_its_place(tmp_path, capsys):
    words = ("--hosts", "2", "--gpu", "H200", "--bucket", "s3://runs", "--to", str(tmp_path / "task.yaml"))
    assert written(capsys, "skypilot", RECIPE, *MESH, "run_dir=/runs/x", *words) == ""
    task = yaml.safe_load((tmp_path / "task.yaml").read_text())
    assert task.keys() <= FIELDS["sky"]
    assert task["resources"].keys() <= FIELDS["sky resources"]
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H200:8")
    assert task["file_mounts"]["/runs/x"]["source"] == "s3://runs"
    (tmp_path / "python").write_text("#!/bin/bash\nenv | grep ^JAX_\n")
    (tmp_path / "python").chmod(0o755)
    sky = {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.9", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    said = subprocess.run(
        ["bash", "-c", task["run"]], env=sky | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True,
        text=True, check=True,
    ).stdout  # fmt: skip
    place = {"JAX_COORDINATOR_ADDRESS=10.0.0.7:8476", "JAX_NUM_PROCESSES=2", "JAX_PROCESS_ID=1"}
    assert set(said.split()) == place


def test_xla_knows_the_flags():
    """XLA ends a program that is given a flag it does not know."""
    environ = os.environ | {"XLA_FLAGS": GPU_ENVIRONMENT["XLA_FLAGS"], "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=environ, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("slurm", RECIPE, "mesh.fsdp=3", "--hosts", "2"), "16 devices"),
        (("slurm", RECIPE, "optimizer.lr=1", "--hosts", "2"), "optimizer.lr"),
        (("slurm", RECIPE, *MESH, "--hosts", "0"), "--hosts 0"),
        (("slurm", RECIPE, *MESH, "--hosts", "2", "--time", "soon"), "--time 'soon'"),
        (("slurm", RECIPE, *MESH, "--hosts", "2", "--name", "Caps"), "--name 'Caps'"),
        (("slurm", RECIPE, *MESH, "--hosts", "2", "--name", "a" * 41), "at most 40 lower-case letters"),
        (("slurm", RECIPE, *MESH, "--hosts", "2", "run_dir=runs/2024"), "--name '2024': expected at most 40"),
        (("slurm", RECIPE, *MESH, "--hosts", "2", "--partition", "a b"), "--partition 'a b': expected names of"),
        (("slurm", RECIPE, *MESH, "--hosts", "2", "--account", "x;y"), "--account 'x;y': expected a name"),
        (("slurm", RECIPE, *MESH, "--hosts", "2", "--cpus-per-host", "0"), "--cpus-per-host 0: at least 1"),
        (("slurm", RECIPE, *MESH), "--hosts"),
        (("k8s", RECIPE, *MESH, *IN_A_CLAIM, "--namespace", "My_Team"), "--namespace 'My_Team': expected at most 63"),
        (("k8s", RECIPE, *MESH, *IN_A_CLAIM, "--namespace", "n" * 64), "expected at most 63 lower-case letters"),
        (("k8s", RECIPE, *MESH, *IN_A_CLAIM, "--namespace", "team-"), "no dash first or last"),
        (("k8s", RECIPE, *MESH, *IN_A_CLAIM, "--claim", "My Claim"), "--claim 'My Claim': expected lower-case letters"),
        (("k8s", RECIPE, *MESH, *IN_A_CLAIM, "--claim", "a..b"), "--claim 'a..b'"),
        (("k8s", RECIPE, *MESH, *IN_A_CLAIM, "--image", "an image"), "--image 'an image': expected [REGISTRY/]NAME"),
        (("k8s", RECIPE, *MESH, *IN_A_CLAIM, "--tpu", "TPU v5:2x2"), "KIND:TOPOLOGY"),
        (("k8s", RECIPE, *MESH, "--hosts", "2", "--image", "i", "--claim", "c"), "absolute path"),
        (
            ("k8s", RECIPE, *MESH, "--tpu", "v5p", *IN_A_CLAIM),
            "KIND:TOPOLOGY",
        ),
        (
            ("k8s", RECIPE, "--tpu", "tpu-v5p-slice:2x2x4", "--gpus-per-host", "4", *IN_A_CLAIM),
            "16 chips, --hosts 2 with --gpus-per-host 4 are 8",
        ),
        (("skypilot", RECIPE, *MESH, "--hosts", "2", "--gpu", "H200", "--bucket", "s3://runs"), "absolute path"),
        (
            ("skypilot", RECIPE, *MESH, "run_dir=/r/x", "--hosts", "2", "--gpu", "H200", "--bucket", "b"),
            "--bucket 'b' names no store",
        ),
        (
            ("skypilot", RECIPE, *MESH, "run_dir=/r/x", "--hosts", "2", "--gpu", "H200", "--bucket", "s3://a b"),
            "--bucket 's3://a b': expected a store's address",
        ),
        (
            ("skypilot", RECIPE, *MESH, "run_dir=/r/x", "--hosts", "2", "--gpu", "H200:8", "--bucket", "s3://runs"),
            "--gpu 'H200:8': expected SkyPilot's name alone, such as H200; --gpus-per-host says how many",
        ),
    ],
)
def test_what_cannot_run_is_refused(capsys, words, said):
    assert said in written(capsys, *words, code=2)


def test_names_and_times_of_both_kinds():
    Order("a", "c", (), "", "", 1, 1, 0)
    assert Slurm("2-12:00:00").time == "2-12:00:00"
    assert Tpu.parse("tpu-v6e-slice:4x4") == Tpu("tpu-v6e-slice", "4x4")
    Slurm(partition="gpu,gpu_long", account="team.a")
    Kubernetes("europe-docker.pkg.dev/p/r/trainer:v1@sha256:abc", "runs.team-a", "/runs", "team-a")
    Sky("A100-80GB", "gs://my-runs/grpo")
