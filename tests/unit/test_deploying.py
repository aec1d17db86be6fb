"""The files of deploy/ agree with Kubernetes, with systemd and nginx, and with the server that they start."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from infer.cli import flags
from infer.cli.main import build_parser
from infer.cli.serve import read_models
from infer.client import supervisor
from infer.config.knobs import parse_bytes
from infer.config.server import ServerConfig
from infer.config.settings import EngineConfig
from infer.server.serve import LAST_WRITES_S, warn_if_open
from tests.support.app import Site
from tests.support.images import DEPLOY, ROOT, exec_form, health_command, is_sent, read_dockerfile

# A parser that is built where PyTorch is not yet imported puts parts of it off, which other tests need.
importlib.import_module("torch")

DOCKERFILES = ("Dockerfile.cpu", "Dockerfile.cuda")
MANIFESTS = DEPLOY / "kubernetes"
PAGE = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8")
KEYS = {"api_key": ["client", "scrape"], "admin_key": "operator"}


def load(name: str) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load((MANIFESTS / name).read_text(encoding="utf-8"))
    return made


def merge(base: Any, patch: Any) -> Any:
    """A strategic merge, as far as our patches need it: maps deeply, lists of named things by name."""
    if isinstance(base, dict) and isinstance(patch, dict):
        made = dict(base)
        for key, value in patch.items():
            made[key] = merge(base[key], value) if key in base else value
        return made
    if isinstance(base, list) and all(isinstance(row, dict) and "name" in row for row in [*base, *patch]):
        rows = {row["name"]: row for row in base}
        for row in patch:
            rows[row["name"]] = merge(rows.get(row["name"], {}), row)
        return list(rows.values())
    return patch


def deployment(overlay: str) -> dict[str, Any]:
    """The Deployment of the base, or of the overlay for GPUs."""
    base = load("base/deployment.yaml")
    return base if overlay == "base" else dict(merge(base, load("gpu/one-gpu.yaml")))


def pod(overlay: str) -> dict[str, Any]:
    spec: dict[str, Any] = deployment(overlay)["spec"]["template"]["spec"]
    return spec


def container(overlay: str) -> dict[str, Any]:
    [only] = pod(overlay)["containers"]
    return dict(only)


def objects() -> list[dict[str, Any]]:
    """Every object of Kubernetes' own kinds that we ship."""
    names = ("base/service.yaml", "base/disruption-budget.yaml", "autoscaling/autoscaler.yaml")
    return [deployment("base"), deployment("gpu"), *map(load, names)]


@functools.cache
def recorded() -> dict[str, Any]:
    made: dict[str, Any] = json.loads((ROOT / "tests/data/kubernetes.json").read_text(encoding="utf-8"))
    return made


def validate(thing: dict[str, Any]) -> None:
    schema = recorded()["kinds"][thing["kind"]] | {"definitions": recorded()["definitions"]}
    jsonschema.Draft7Validator(schema).validate(thing)


def validate_pod(spec: dict[str, Any]) -> None:
    """Check the part of an object that is a pod, as a Deployment would hold it."""
    definitions = recorded()["definitions"]
    jsonschema.Draft7Validator(
        {"$ref": "#/definitions/io.k8s.api.core.v1.PodSpec", "definitions": definitions}
    ).validate(spec)


def settings_of(words: list[str], tmp_path: Path) -> tuple[EngineConfig, ServerConfig]:
    """What a command line means to the real parser; the file of --config has keys."""
    assert words[0].rpartition("/")[2] == "infer"
    if "--config" in words:
        secret = tmp_path / "server.yaml"
        secret.write_text(yaml.safe_dump(KEYS), encoding="utf-8")
        words = [*words[: words.index("--config") + 1], str(secret), *words[words.index("--config") + 2 :]]
    args = build_parser().parse_args(words[1:])
    models, server = read_models(args, flags.knobs_from(args, with_server=True))
    return next(iter(models.values())), server


def command_of(overlay: str) -> list[str]:
    """The image's entry point and the arguments that the manifest adds."""
    name = {"base": "Dockerfile.cpu", "gpu": "Dockerfile.cuda"}[overlay]
    assert "command" not in container(overlay)
    return [*exec_form(read_dockerfile(name)[-1].one("ENTRYPOINT")), *container(overlay)["args"]]


@pytest.mark.parametrize("thing", objects(), ids=lambda thing: thing["kind"])
def test_kubernetes_knows_every_field(thing: dict[str, Any]) -> None:
    validate(thing)


def test_a_misspelled_field_a_wrong_type_and_a_missing_field_are_noticed() -> None:
    def broken(change: str) -> dict[str, Any]:
        thing = copy.deepcopy(deployment("base"))
        spec = thing["spec"]["template"]["spec"]
        if change == "misspelled":
            spec["containers"][0]["readynessProbe"] = spec["containers"][0].pop("readinessProbe")
        elif change == "type":
            spec["terminationGracePeriodSeconds"] = "150"
        else:
            del spec["containers"][0]["name"]
        return thing

    for change in ("misspelled", "type", "missing"):
        with pytest.raises(jsonschema.ValidationError):
            validate(broken(change))


@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_kustomize_makes_what_these_tests_read(overlay: str) -> None:
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run([kubectl, "kustomize", MANIFESTS / overlay], capture_output=True, text=True)
    if "unknown field" in done.stderr or "unmarshal" in done.stderr:
        pytest.skip("this kubectl has a kustomize that is too old for components")
    assert done.returncode == 0, done.stderr
    made = {thing["kind"]: thing for thing in yaml.safe_load_all(done.stdout)}
    [built] = made["Deployment"]["spec"]["template"]["spec"]["containers"]
    wanted = container(overlay)
    assert built["args"] == wanted["args"] and built["resources"] == wanted["resources"]
    assert {row["name"] for row in built["volumeMounts"]} == {row["name"] for row in wanted["volumeMounts"]}
    assert built["image"] == {"base": "infer:cpu", "gpu": "infer:cuda"}[overlay]


@pytest.mark.parametrize("folder", ["base", "gpu", "autoscaling", "gpu-autoscaling"])
def test_a_kustomization_lists_files_that_exist_and_leaves_none_out(folder: str) -> None:
    made = load(f"{folder}/kustomization.yaml")
    patches = [patch["path"] for patch in made.get("patches", ()) if "path" in patch]
    listed = {*made.get("resources", ()), *made.get("components", ()), *patches}
    assert all((MANIFESTS / folder / name).exists() for name in listed)
    files = {file.name for file in (MANIFESTS / folder).iterdir()}
    assert files - listed <= {"kustomization.yaml", "adapter-rules.yaml"}


@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_the_server_understands_its_arguments_and_asks_for_keys(overlay: str, tmp_path: Path) -> None:
    engine, server = settings_of(command_of(overlay), tmp_path)
    assert server.host == "0.0.0.0" and server.api_key and server.admin_key
    [port] = container(overlay)["ports"]
    assert port["containerPort"] == server.port
    if overlay == "base":
        assert str(engine.load.num_threads) == container(overlay)["resources"]["limits"]["cpu"]


@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_a_pod_has_time_to_drain(overlay: str, tmp_path: Path) -> None:
    _, server = settings_of(command_of(overlay), tmp_path)
    before = container(overlay)["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = before + server.drain_timeout + supervisor.STOP_TIMEOUT + LAST_WRITES_S
    assert pod(overlay)["terminationGracePeriodSeconds"] > needed


def test_probes_ask_what_is_answered_without_a_key_and_mean_it() -> None:
    site = Site(api_key=("secret",))
    only = container("base")
    paths = {kind: only[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}

    def statuses() -> dict[str, int]:
        return {kind: site.request("GET", path).status_code for kind, path in paths.items()}

    assert statuses() == {"startup": 200, "readiness": 200, "liveness": 200}
    site.state.board.is_starting = True
    assert statuses()["startup"] == 503
    site.state.board.is_starting = False
    site.clients[0].failure = RuntimeError("dead")
    assert statuses() == {"startup": 503, "readiness": 503, "liveness": 200}
    site.clients[0].failure = None
    site.state.board.is_draining = True
    assert statuses()["readiness"] == 503 and statuses()["liveness"] == 200


def test_a_download_fits_into_the_start() -> None:
    probe = container("base")["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 30 * 60


def test_every_metric_that_is_scaled_by_is_on_the_page(tmp_path: Path) -> None:
    site = Site(api_key=("secret",))
    page = {name.partition("{")[0] for name in site.metrics()}
    scaler = load("autoscaling/autoscaler.yaml")["spec"]
    targets = {row["pods"]["metric"]["name"]: row["pods"]["target"] for row in scaler["metrics"]}
    rules = load("autoscaling/adapter-rules.yaml")["rules"]["custom"]
    offered = {rule["name"]["as"]: rule["seriesQuery"].partition("{")[0] for rule in rules}
    assert targets.keys() == offered.keys()
    assert set(offered.values()) <= page
    assert scaler["scaleTargetRef"]["name"] == deployment("base")["metadata"]["name"]


@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_pods_are_kept_while_their_batches_are_three_quarters_full(overlay: str, tmp_path: Path) -> None:
    scaler = load("autoscaling/autoscaler.yaml")
    if overlay == "gpu":
        [patch] = load("gpu-autoscaling/kustomization.yaml")["patches"]
        assert patch["target"] == {"kind": scaler["kind"], "name": scaler["metadata"]["name"]}
        for step in yaml.safe_load(patch["patch"]):
            place: Any = scaler
            *way, last = step["path"].split("/")[1:]
            for key in way:
                place = place[int(key) if key.isdigit() else key]
            assert step["op"] != "test" or place[last] == step["value"]
            place[last] = step["value"]
        validate(scaler)
    [running] = [
        row["pods"] for row in scaler["spec"]["metrics"] if "running" in row["pods"]["metric"]["name"]
    ]
    engine, _ = settings_of(command_of(overlay), tmp_path)
    assert int(running["target"]["averageValue"]) == 0.75 * (engine.scheduler.max_batch_size or 0)
    assert f"[../{'gpu-' * (overlay == 'gpu')}autoscaling]" in PAGE


def test_every_series_on_the_docs_page_is_on_the_metrics_page() -> None:
    site = Site()
    site.request("GET", "/health")
    page = {name.partition("{")[0] for name in site.metrics()}
    whole = page | {name.removesuffix("_bucket") for name in page}
    named = set(re.findall(r"\binfer_[a-z_]+[a-z]", PAGE))
    assert len(named) > 8 and named - whole == set()


def test_metrics_are_read_with_a_key_of_the_secret() -> None:
    [endpoint] = load("autoscaling/pod-monitor.yaml")["spec"]["podMetricsEndpoints"]
    assert Site(api_key=("secret",)).request("GET", endpoint["path"]).status_code == 401
    headers = {"authorization": "Bearer secret"}
    assert Site(api_key=("secret",)).request("GET", endpoint["path"], headers=headers).status_code == 200
    [volume] = [each for each in pod("base")["volumes"] if "secret" in each]
    credentials = endpoint["authorization"]["credentials"]
    assert credentials["name"] == volume["secret"]["secretName"]
    made = set(re.findall(r"--from-(?:file|literal)=([\w.-]+)", PAGE))
    assert {credentials["key"], *(item["key"] for item in volume["secret"]["items"])} <= made
    assert f"kubectl create secret generic {credentials['name']}" in PAGE


def test_the_page_makes_a_file_of_keys_that_the_server_reads(tmp_path: Path) -> None:
    [script] = re.findall(r"cat > server\.yaml <<EOF\n(.*?)^EOF$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "server.yaml").write_text(script, encoding="utf-8")
    args = build_parser().parse_args(["serve", "--config", str(tmp_path / "server.yaml")])
    _, server = read_models(args, flags.knobs_from(args, with_server=True))
    assert len(server.api_key) == 2 and server.admin_key


@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_a_pod_is_not_root_and_writes_to_its_volumes_alone(overlay: str) -> None:
    name = {"base": "Dockerfile.cpu", "gpu": "Dockerfile.cuda"}[overlay]
    final = read_dockerfile(name)[-1]
    context = pod(overlay)["securityContext"]
    assert context["runAsNonRoot"] is True
    assert final.one("USER") == f"{context['runAsUser']}:{context['runAsGroup']}"
    only = container(overlay)
    assert only["securityContext"]["readOnlyRootFilesystem"] is True
    assert only["securityContext"]["allowPrivilegeEscalation"] is False
    mounts = {row["name"]: row["mountPath"] for row in only["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod(overlay)["volumes"]}
    assert mounts["cache"] == final.environment()["XDG_CACHE_HOME"]
    assert mounts["tmp"] == "/tmp"


def test_selectors_find_the_pods() -> None:
    labels = deployment("base")["spec"]["template"]["metadata"]["labels"]
    assert deployment("base")["spec"]["selector"]["matchLabels"] == labels
    assert load("base/service.yaml")["spec"]["selector"] == labels
    assert load("base/disruption-budget.yaml")["spec"]["selector"]["matchLabels"] == labels
    assert load("autoscaling/pod-monitor.yaml")["spec"]["selector"]["matchLabels"] == labels
    [port] = load("base/service.yaml")["spec"]["ports"]
    assert port["targetPort"] == container("base")["ports"][0]["name"]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_is_built_from_files_that_exist(name: str) -> None:
    build, final = read_dockerfile(name)
    copied = [source for sources, _ in build.copies() for source in sources]
    assert {"src", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} == set(copied)
    assert all((ROOT / source).exists() and is_sent(source) for source in copied)
    assert final.copies() == []
    assert final.all("COPY") == ["--from=build /opt/infer /opt/infer"]
    assert is_sent("src/infer/__init__.py") and not is_sent("src/infer/__pycache__/x.pyc")
    for secret in (".git/config", ".env", "server.yaml", "tests/conftest.py", "model.safetensors"):
        assert not is_sent(secret), secret


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_starts_the_server_itself_as_a_user_without_rights(name: str, tmp_path: Path) -> None:
    _, final = read_dockerfile(name)
    user = final.one("USER").partition(":")[0]
    assert user.isdigit() and int(user) > 0
    assert f"useradd --uid {user} " in " ".join(final.all("RUN"))
    _, server = settings_of(exec_form(final.one("ENTRYPOINT")), tmp_path)
    assert server.host == "0.0.0.0"
    assert final.one("EXPOSE") == str(server.port)
    volume = final.one("VOLUME")
    caches = [value for key, value in final.environment().items() if key.endswith(("HOME", "_DIR"))]
    assert caches and all(Path(value).is_relative_to(volume) for value in caches)
    assert f"http://127.0.0.1:{server.port}/health" in " ".join(health_command(final))
    order = [step for step, _ in final.steps]
    assert max(index for index, step in enumerate(order) if step == "RUN") < order.index("USER")


@pytest.mark.parametrize(
    ("added", "where"),
    [
        ([], ("0.0.0.0", 8000, None)),
        (["org/name", "--uds", "/run/x.sock"], ("0.0.0.0", 8000, "/run/x.sock")),
        (["--port", "80", "--uds", "/run/x.sock"], ("0.0.0.0", 80, "/run/x.sock")),
        (["--host", "::", "--config", "/etc/infer/server.yaml"], ("::", 8000, None)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", DOCKERFILES)
def test_arguments_of_a_container_may_change_where_it_listens(
    name: str, added: list[str], where: tuple[str, int, str | None], tmp_path: Path
) -> None:
    entry = exec_form(read_dockerfile(name)[-1].one("ENTRYPOINT"))
    _, server = settings_of([*entry, *added], tmp_path)
    assert (server.host, server.port, server.uds) == where


def shown_commands() -> list[str]:
    """Every line of the docs that starts a server, without what stands next to it."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    shown = [
        re.split(r"  +|\s[&#]", line.strip())[0] for line in lines if re.match(r" *infer serve( |$)", line)
    ]
    return sorted({line for line in shown if not re.search(r"[│─►]", line)})


@pytest.mark.parametrize("command", shown_commands())
def test_the_settings_of_every_server_in_the_docs_are_accepted(command: str, tmp_path: Path) -> None:
    without_keys = re.sub(r" --config \S+", "", command)  # those of an operator are refused in a cluster
    settings_of(shlex.split(without_keys), tmp_path)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_holds_no_secret(name: str) -> None:
    for stage in read_dockerfile(name):
        named = [*stage.environment(), *(text.partition("=")[0] for text in stage.all("ARG"))]
        assert not [word for word in named if re.search("KEY|TOKEN|SECRET|PASSWORD", word, re.IGNORECASE)]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_has_the_wheel_that_the_wheel_test_makes(name: str) -> None:
    [command] = [text for text in read_dockerfile(name)[0].all("RUN") if "pip wheel" in text]
    tested = (ROOT / "tests/integration/test_wheel.py").read_text(encoding="utf-8")
    [line] = re.findall(r"pip = \[sys\.executable, (.*)\]", tested)
    ours = {word for word in shlex.split(command) if word.startswith("--")}
    theirs = {word for word in re.findall(r'"(.*?)"', line) if word.startswith("--")}
    assert ours - {"--wheel-dir"} == theirs - {"--quiet"}


def test_the_page_lets_a_container_drain_before_it_is_killed() -> None:
    comments = [(DEPLOY / name).read_text(encoding="utf-8") for name in DOCKERFILES]
    seconds = [
        int(number) for text in (PAGE, *comments) for number in re.findall(r"--stop-timeout (\d+)", text)
    ]
    assert len(seconds) >= 3
    assert min(seconds) > ServerConfig().drain_timeout + supervisor.STOP_TIMEOUT + LAST_WRITES_S


def test_kuberay_starts_our_application_with_knobs_that_exist() -> None:
    made = yaml.safe_load((DEPLOY / "kuberay/rayservice.yaml").read_text(encoding="utf-8"))
    assert (made["apiVersion"], made["kind"]) == ("ray.io/v1", "RayService")
    [application] = yaml.safe_load(made["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    knobs = dict(application["args"])
    deployment = knobs.pop("deployment")
    drain_s = knobs.pop("drain_timeout")
    EngineConfig.from_knobs(**knobs)
    scaling, actor = deployment["autoscaling_config"], deployment["ray_actor_options"]
    assert deployment["graceful_shutdown_timeout_s"] > drain_s + supervisor.STOP_TIMEOUT + LAST_WRITES_S
    assert scaling["target_ongoing_requests"] < knobs["max_batch_size"]
    cluster = made["spec"]["rayClusterConfig"]
    [workers] = cluster["workerGroupSpecs"]
    assert workers["maxReplicas"] >= scaling["max_replicas"]
    image = (DEPLOY / "kuberay/Dockerfile").read_text(encoding="utf-8")
    assert f'"ray[default,serve]=={cluster["rayVersion"]}"' in image
    assert "--no-install-recommends wget" in image, "KubeRay's probes run wget in the container"
    # The operator and the autoscaler's container need the token, too; only KubeRay gives it to all of them.
    assert cluster["authOptions"] == {"mode": "token"}
    for group in (cluster["headGroupSpec"], workers):
        spec = group["template"]["spec"]
        validate_pod(spec)
        [only] = spec["containers"]
        assert "env" not in only
    limits = workers["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert float(limits["cpu"]) >= actor["num_cpus"] and float(limits["nvidia.com/gpu"]) >= actor["num_gpus"]


def unit_values(name: str) -> list[str]:
    text = (DEPLOY / "infer.service").read_text(encoding="utf-8")
    return re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)


def test_the_unit_starts_the_server_and_lets_it_drain(tmp_path: Path) -> None:
    [start], [timeout] = unit_values("ExecStart"), unit_values("TimeoutStopSec")
    _, server = settings_of(shlex.split(start), tmp_path)
    assert int(timeout) > server.drain_timeout + supervisor.STOP_TIMEOUT + LAST_WRITES_S
    assert unit_values("KillMode") == ["mixed"] and unit_values("Restart") == ["on-failure"]
    [source] = unit_values("LoadCredential")
    assert f"%d/{source.partition(':')[0]}" in start


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "infer.service").read_text(encoding="utf-8")
    unit = tmp_path / "infer.service"
    unit.write_text(text.replace("/opt/infer/bin/infer", sys.executable), encoding="utf-8")
    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "infer.service" not in done.stderr, done.stderr


def directives(name: str) -> list[str]:
    text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    return re.findall(rf"^\s*{name} (.*?);", text, re.MULTILINE)


def test_the_proxy_streams_and_outlasts_the_server() -> None:
    server = ServerConfig()
    assert directives("proxy_buffering") == ["off"] and directives("gzip") == ["off"]
    [timeout], [size] = directives("proxy_read_timeout"), directives("client_max_body_size")
    assert float(timeout.removesuffix("s")) > server.request_timeout
    assert parse_bytes(size.removesuffix("m") + "MiB") == parse_bytes(server.max_body_size)


def test_nginx_accepts_the_configuration(tmp_path: Path) -> None:
    if (nginx := shutil.which("nginx")) is None or shutil.which("openssl") is None:
        pytest.skip("nginx or openssl is not installed")
    pair = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", *pair]
    subprocess.run(make, check=True, capture_output=True)
    ours = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    for name, file in {"pem": "cert.pem", "key": "key.pem"}.items():
        ours = ours.replace(f"/etc/nginx/tls/llm.example.com.{name}", str(tmp_path / file))
    head = f"pid {tmp_path}/pid; error_log {tmp_path}/errors; events {{}}"
    (tmp_path / "nginx.conf").write_text(f"{head} http {{ access_log off; {ours} }}", encoding="utf-8")
    done = subprocess.run([nginx, "-t", "-c", tmp_path / "nginx.conf"], capture_output=True, text=True)
    assert "syntax is ok" in done.stderr, done.stderr  # the rest is about folders of this machine


def test_the_page_is_open_about_servers_without_keys(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_open(ServerConfig(host="0.0.0.0"))
    assert "without a key" in caplog.text
    warned = re.search(r"^(.*without a key.*)$", PAGE, re.MULTILINE)
    assert warned is not None


def test_commands_on_the_page_are_understood_by_the_parser() -> None:
    commands = re.findall(r"^(?:\S*/)?infer (serve .*)$", PAGE, re.MULTILINE)
    assert commands
    for command in commands:
        build_parser().parse_args(shlex.split(command, comments=True))
