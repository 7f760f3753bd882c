"""A Docker engine of our own, where none runs: below one scratch folder, nothing of the host changed.

Debian's packages are downloaded and unpacked there, not installed: installing would start an engine that
sets up bridges and firewall rules.
"""

import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("docker.io", "docker-compose", "debootstrap")
PROGRAMS = ("dockerd", "containerd", "runc", "debootstrap", "docker-compose")
START_SECONDS = 200
STOP_SECONDS = 60


class NoEngine(RuntimeError):
    """A container engine cannot run on this machine; the text says why."""


@dataclass(frozen=True)
class Tools:
    """The programs of the packages, wherever they are."""

    environment: dict[str, str]
    """With which they run: PATH, LD_LIBRARY_PATH, PYTHONPATH and DEBOOTSTRAP_DIR reach what was unpacked."""

    def which(self, program: str) -> str:
        """Path of a program.

        Raises:
            NoEngine: there is none.
        """
        found = shutil.which(program, path=self.environment["PATH"])
        if found is None:
            raise NoEngine(f"{program} is neither installed nor in Debian's packages {', '.join(PACKAGES)}")
        return found

    def run(self, *command: str | Path, seconds: float) -> str:
        """Run a program; its output.

        Raises:
            RuntimeError: it failed or took too long; the text has the end of its output.
        """
        text = " ".join(map(str, command))
        try:
            done = subprocess.run(
                [self.which(str(command[0])), *map(str, command[1:])],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"waited {seconds:.0f} s for {text}") from None
        if done.returncode:
            raise RuntimeError(f"{text}: exit code {done.returncode}\n{done.stdout[-4000:]}")
        return done.stdout


def fetch_tools(scratch: Path) -> Tools:
    """The programs, from the machine where it has them, else unpacked below `scratch`.

    Raises:
        NoEngine: not root, or the packages cannot be had.
    """
    if os.geteuid() != 0:
        raise NoEngine("a container engine of our own needs root; start one and set DOCKER_HOST")
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        if shutil.which("apt-get") is None:
            raise NoEngine(f"{', '.join(missing)} not installed, and this is no Debian")
        if not (scratch / "root").exists():
            _unpack(scratch)
    root = scratch / "root"
    before = {
        "PATH": f"{root}/usr/sbin:{root}/usr/bin",
        "LD_LIBRARY_PATH": f"{root}/usr/lib/x86_64-linux-gnu",
    }
    environment = dict(os.environ)
    if (plugins := root / "usr/lib/x86_64-linux-gnu/xtables").is_dir():
        environment["XTABLES_LIBDIR"] = str(plugins)
    for name, value in before.items():
        environment[name] = f"{value}:{environment[name]}" if environment.get(name) else value
    environment["PATH"] += ":/usr/sbin:/sbin"
    if (root / "usr/share/debootstrap").is_dir():
        environment["DEBOOTSTRAP_DIR"] = f"{root}/usr/share/debootstrap"
    return Tools(environment)


def _unpack(scratch: Path) -> None:
    archives = scratch / "archives"
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    # Lists too have a folder of their own only where the machine has none: updating them takes a while.
    apt = ["apt-get", "-y", "-qq", "-o", f"Dir::Cache::archives={archives}", "--no-install-recommends"]
    get = [*apt, "--download-only", "install", *PACKAGES]
    first = subprocess.run(get, capture_output=True, text=True, timeout=300, check=False)
    if first.returncode:
        subprocess.run(["apt-get", "update", "-qq"], capture_output=True, timeout=300, check=False)
        first = subprocess.run(get, capture_output=True, text=True, timeout=300, check=False)
    if first.returncode:
        raise NoEngine(
            f"Debian's packages {', '.join(PACKAGES)} cannot be had: {first.stderr[-500:].strip()}"
        )
    for archive in sorted(archives.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", archive, scratch / "root"], check=True, timeout=120)
    # Installing would make these names. The engine needs them in a container's own network, where they lead
    # questions for names to it; on the host's it is told to leave them alone.
    for name in ("iptables", "ip6tables"):
        (scratch / "root/usr/sbin" / name).symlink_to(f"{name}-nft")


class Engine:
    """dockerd with its own data, state and socket; leaves bridges, firewall and forwarding alone."""

    def __init__(self, tools: Tools, scratch: Path) -> None:
        self.tools, self.scratch = tools, scratch
        self.socket = f"unix://{scratch}/docker.sock"

    def start(self) -> None:
        """Return once it answers.

        Raises:
            NoEngine: it does not run here; the text has the end of its log.
        """
        log = self.scratch / "dockerd.log"
        flags = ["--storage-driver=overlay2", "--bridge=none", "--iptables=false", "--ip6tables=false"]
        flags += ["--ip-forward=false", "--exec-opt=native.cgroupdriver=cgroupfs", "-H", self.socket]
        flags += [f"--data-root={self.scratch}/data", f"--exec-root={self.scratch}/exec"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [self.tools.which("dockerd"), *flags, f"--pidfile={self.scratch}/dockerd.pid"],
                env=self.tools.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not (self.scratch / "docker.sock").exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise NoEngine(f"dockerd does not run here:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End it and what it started, and take its mounts away."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(10)
        for mount in mounts_below(self.scratch):
            subprocess.run(["umount", "-l", mount], capture_output=True, timeout=30, check=False)


def mounts_below(folder: Path) -> list[str]:
    """Mount points below a folder, the innermost first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return sorted((point for point in points if point.startswith(f"{folder}/")), key=len, reverse=True)


def machine_engine() -> str | None:
    """Address of an engine that runs on this machine already."""
    if host := os.environ.get("DOCKER_HOST"):
        return host
    return "unix:///var/run/docker.sock" if Path("/var/run/docker.sock").is_socket() else None
