"""Two turns of an environment of verifiers 0.4, whose training client asks a server.

    python tests/serve/verifiers_client.py http://127.0.0.1:8000/v1 FOLDER_OF_THE_TOKENIZER

It prints JSON: for each branch of the trace (token ids, whether each was sampled, log-probs, the shape
of the experts that the server recorded, reward).
It runs in an environment with verifiers, without this project.
"""

import asyncio
import json
import sys

import openai
import verifiers.v1 as vf
from renderers import Qwen3RendererConfig


class Question(vf.Task):
    @vf.reward(weight=1.0)
    async def answered(self, trace) -> float:
        return 1.0


class Questions(vf.Taskset[Question]):
    def load(self):
        yield Question(vf.TaskData(prompt="1+2?"), self.config.task)


class Talk(vf.Harness[vf.HarnessConfig]):
    """Asks the task's prompt, and then a second question."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ):
        messages = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for question in ("And 3+4?", None):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages += [
                    {"role": "assistant", "content": reply.choices[0].message.content or ""},
                    {"role": "user", "content": question},
                ]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Questions", "Talk"]


async def main(url: str, folder: str) -> None:
    client = vf.TrainClientConfig(
        base_url=url, api_key_var="NO_KEY", renderer_model_name=folder,
        renderer=Qwen3RendererConfig(enable_thinking=False),
    )
    sampling = vf.Sampling(temperature=1.0, max_tokens=8, seed=5, made_up=1)
    config = vf.SingleAgentEnvConfig(
        taskset={"id": "verifiers_client"},
        agent={"harness": {"id": "verifiers_client"}, "runtime": {"type": "subprocess"}},
    )
    env = vf.SingleAgentEnv(config)
    async with env.serving():
        (slot,) = env.slots(next(iter(env.taskset)), 1)
        episode = await env.run_slot(slot, vf.ModelContext("tiny", client, sampling))
    (trace,) = episode.traces
    assert episode.ok, (episode.errors, trace.errors)
    shape = lambda routes: None if routes is None else routes.shape
    print(json.dumps([
        (b.token_ids, b.sampled_mask, b.logprobs, shape(b.routed_experts), trace.reward)
        for b in trace.branches
    ]))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
