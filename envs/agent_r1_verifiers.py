"""The taskset id `agent_r1_verifiers`: verifiers finds the classes of `agent_r1.adapters.verifiers` here."""

from agent_r1.adapters.verifiers import AgentR1Env, AgentR1Taskset, OneReply

__all__ = ["AgentR1Env", "AgentR1Taskset", "OneReply"]
