# Collects rollouts, checks their kept sets, drives trainer and inference.
# From the repository's root: docker build -f deploy/docker/orchestrator.Dockerfile -t keptset-orchestrator .
# deploy/docker/README.md has the build arguments.
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS build
ARG PROFILE=cpu
# Where pip looks; these reach the build stage only.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /source
COPY deploy/docker/install.sh deploy/docker/compile.sh /usr/local/bin/
COPY deploy/pins/${PROFILE}/orchestrator.txt pins.txt
RUN install.sh third-party "$PROFILE" pins.txt
COPY libs/kept_tokens libs/kept_tokens
COPY libs/guards libs/guards
COPY libs/settings libs/settings
COPY services/orchestrator services/orchestrator
RUN install.sh ours pins.txt libs/kept_tokens libs/guards libs/settings services/orchestrator
RUN compile.sh

FROM ${BASE}
ARG PROFILE=cpu
RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt \
 && groupadd --gid 10001 keptset \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin keptset \
 && for name in models weights runs trainer gpu secrets; do \
      install -d -o keptset -g keptset -m 0750 /var/lib/keptset/$name; done
COPY --from=build /opt/keptset /opt/keptset
COPY deploy/docker/health.py deploy/docker/make_secrets.py /opt/keptset/
ENV PATH=/opt/keptset/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    KEPTSET_ORCHESTRATOR__HOST=0.0.0.0
USER 10001:10001
WORKDIR /tmp
EXPOSE 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=6 \
  CMD ["python", "-I", "-S", "/opt/keptset/health.py", "orchestrator", "8002"]
ENTRYPOINT ["tini", "--", "keptset-orchestrator"]
# Last, so that a new revision keeps all layers.
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="keptset-orchestrator" \
      org.opencontainers.image.description="Collects rollouts, checks their kept sets, drives trainer and inference." \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.licenses="Apache-2.0" \
      keptset.profile="$PROFILE"
