"""The images' base, made with debootstrap under a tag of its own where no registry is in reach."""

import shutil
import subprocess
from pathlib import Path

import docker
import docker.errors

from .scratch_engine import Tools

REGISTRY_BASE = "python:3.11.13-slim-bookworm"
"""As in the Dockerfiles."""
OWN_BASE = "keptset-test-base:bookworm"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def base_image(client: docker.DockerClient, tools: Tools, scratch: Path) -> str:
    """The tag to build from: the registry's, if it can be pulled, else one that is made here."""
    for tag in (REGISTRY_BASE, OWN_BASE):
        if client.images.list(name=tag):
            return tag
    try:
        client.images.pull(REGISTRY_BASE)
    except docker.errors.APIError:
        make_base(client, tools, scratch)
        return OWN_BASE
    return REGISTRY_BASE


def make_base(client: docker.DockerClient, tools: Tools, scratch: Path) -> None:
    """Debian with Python and pip, and the certificates that this machine trusts."""
    root, archive = scratch / "base", scratch / "base.tar"
    packages = "python3,python3-pip,python3-venv,ca-certificates"
    tools.run(
        "debootstrap",
        *("--variant=minbase", f"--include={packages}", "bookworm", root, "http://deb.debian.org/debian"),
        seconds=420,
    )
    shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
    (root / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink(missing_ok=True)
    (root / "usr/bin/python").symlink_to("python3")
    shutil.copyfile(CERTIFICATES, root / "etc/ssl/certs/ca-certificates.crt")
    subprocess.run(["tar", "-C", root, "-cf", archive, "."], check=True, timeout=120)
    shutil.rmtree(root)
    repository, tag = OWN_BASE.split(":")
    places = ":".join(f"{top}/{kind}" for top in ("/usr/local", "/usr", "") for kind in ("sbin", "bin"))
    environment = f"ENV PIP_CERT={CERTIFICATES} SSL_CERT_FILE={CERTIFICATES} PATH={places}"
    client.api.import_image_from_file(str(archive), repository=repository, tag=tag, changes=[environment])
    archive.unlink()
