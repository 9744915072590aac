"""A taskset of verifiers with two turns: the policy says something, hears how long it was, and says something again."""

import verifiers.v1 as vf


class LengthData(vf.TaskData):
    wanted: int = 20


class LengthTask(vf.Task[LengthData]):
    @vf.reward(weight=1.0)
    async def closeness(self, trace: vf.Trace) -> float:
        return 1.0 / (1 + abs(len(trace.last_reply) - self.data.wanted))


class LengthTaskset(vf.Taskset[LengthTask, vf.TasksetConfig]):
    def load(self) -> list[LengthTask]:
        asks = {n: f"Say something of {n} characters." for n in range(10, 26)}
        return [LengthTask(LengthData(prompt=ask, wanted=n), self.config.task) for n, ask in asks.items()]


class LengthEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class LengthEnv(vf.Env[LengthEnvConfig]):
    async def run(self, task, agents):
        asked = type(task)(task.data.model_copy(update={"prompt": None}), task.config)
        async with agents.agent.interaction(asked) as chat:
            first = await chat.turn(task.data.prompt_text)
            if not first.terminated:
                await chat.turn(f"That had {len(first.last_reply)} characters. Again.")


__all__ = ["LengthEnv", "LengthTaskset"]
