"""``finetune serve``: a run's model behind an HTTP endpoint."""

import os
import socket
from functools import partial
from pathlib import Path

import click

from finetune.commands import flags
from finetune.commands.console import show_json
from finetune.commands.predict import load
from finetune.devices import Runtime
from finetune.devices.host import limit_kernel_cache
from finetune.errors import UsageError
from finetune.runs.folder import open_run_folder
from finetune.web import require_packages
from finetune.web.workers import run_workers, stop_with_parent

TOKEN_VARIABLE = "FINETUNE_API_TOKEN"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
EXAMPLES = """\b
Examples:
  finetune serve latest                             then open the address
  finetune serve runs/reviews --port 9000
"""


@click.command(epilog=EXAMPLES)
@flags.run_argument
@click.option("--host", default="127.0.0.1", help="Address to listen on.  [default: 127.0.0.1]")
@click.option(
    "--port", type=flags.PORT, default=8000, help="Port; 0 is a free one.  [default: 8000]"
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Name under which clients reach the server; can be repeated.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    help="Processes, each with the model.  [default: 1]",
)
@click.option("--worker", type=int, nargs=2, hidden=True)
@click.option(
    "--log-format",
    type=click.Choice(["json"]),
    help="Write a line of JSON per request to standard error.",
)
@flags.options_of(load)
@flags.with_display
def command(
    *,
    run: Path,
    host: str,
    port: int,
    allowed_hosts: tuple[str, ...],
    workers: int,
    worker: tuple[int, int] | None,
    log_format: str | None,
    device: str,
    runtime: Runtime,
    display: flags.Display,
) -> None:
    """Classify texts over HTTP with the model in the run folder, or bundle, RUN.

    Requests and answers have the shape of the Hugging Face inference API. To listen on another
    --host, set the environment variable FINETUNE_API_TOKEN to a token that clients must send, and
    --allowed-host to the name under which clients reach the server. Ctrl-C and SIGTERM stop the
    server after it has answered all accepted requests.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    if host not in LOCAL_HOSTS and not (token and allowed_hosts):
        raise UsageError(
            f"--host {host} lets other machines in without {TOKEN_VARIABLE} or --allowed-host",
            remedy=f"set {TOKEN_VARIABLE} to a secret that clients send as bearer token, and add "
            "the name under which they reach the server: --allowed-host models.example.org",
        )
    require_packages()
    limit_kernel_cache()
    number, descriptor = worker or (1, None)
    with display.progress():
        from finetune.web.server import bind, local_hosts, run_server

        folder = open_run_folder(run, accepts_bundle=True)
        listener = bind(host, port) if descriptor is None else socket.socket(fileno=descriptor)
        if workers == 1:
            from finetune.web.serve_app import ServedModel, make_serve_app

            model = ServedModel(folder, device=device, runtime=runtime)
    port = listener.getsockname()[1]
    # An IPv6 address has brackets in front of a port.
    names = [f"[{name}]" if name.count(":") > 1 else name for name in allowed_hosts or [host]]
    address = f"http://{names[0]}:{port}"

    def show_address() -> None:
        if display.as_json:
            show_json({"address": address, "run": str(folder.path)})
        else:
            page = address + f"/?token=${TOKEN_VARIABLE}" * bool(token)
            click.echo(f"{folder.path.name} at {page} (Ctrl-C stops)")

    if workers > 1:
        arguments = ["serve", str(folder.path), "--host", host, "--device", device, "--json", "-q"]
        arguments += ["--runtime", runtime]
        arguments += [f"--allowed-host={name}" for name in allowed_hosts]
        arguments += [f"--log-format={log_format}"] if log_format else []
        run_workers(arguments, listener, workers, on_ready=show_address)
        return
    if worker:
        stop_with_parent()
    hosts = [*local_hosts(port), *names, *(f"{name}:{port}" for name in names)]
    log = partial(click.echo, err=True) if log_format else None
    app = make_serve_app(model, address=address, hosts=hosts, token=token, log=log, worker=number)
    show_address()
    run_server(app, listener, on_stop=app.stop)
