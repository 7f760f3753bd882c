"""vLLM's server as it comes, with vLLM's own command line; for where the command `vllm` is not installed."""

import asyncio
import sys

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import serve_http
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM


async def serve(argv: list[str]) -> None:
    """Serve until SIGTERM."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    validate_parsed_serve_args(args)
    engine = AsyncLLM.from_vllm_config(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    try:
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        closing = await serve_http(
            app, sock=None, host=args.host, port=args.port, log_level="warning", access_log=False
        )
        await closing
    finally:
        engine.shutdown(timeout=5)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1:]))
