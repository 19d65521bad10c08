"""What a machine has and what a model will need: the hardware probe and the memory plan."""

from octavo.planning.hardware import Hardware, probe
from octavo.planning.memory import MemoryNeeds, MemoryPlan, plan_memory

__all__ = ["Hardware", "MemoryNeeds", "MemoryPlan", "plan_memory", "probe"]
