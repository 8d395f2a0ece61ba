# An image for CPUs: `docker build -t orchestray .`, then
# `docker run --rm --shm-size 2g -v "$PWD:/work" orchestray train digits.yaml`.
FROM python:3.11-slim AS wheel
COPY . /source
RUN pip wheel --no-deps --wheel-dir /wheels /source

FROM python:3.11-slim
COPY --from=wheel /wheels /wheels
# torch's own index has the build without CUDA, which is a tenth of the size; set TORCH_INDEX to a mirror of it if you have one.
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} /wheels/*.whl && rm -r /wheels
RUN useradd --create-home orchestray
USER orchestray
WORKDIR /work
ENTRYPOINT ["orchestray"]
CMD ["--help"]
