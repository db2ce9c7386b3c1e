"""Reading machine code: opcode counts, and those of the loop that does the MMAs.

The main loop is the innermost natural loop with the most tensor instructions. Counting there,
and dividing by its tensor instructions, gives figures that compilers and tile shapes can be
compared by; the whole kernel's would mix in prologue and epilogue.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ringfp4.errors import BuildError

TENSOR = re.compile(r"^(OMMA|QMMA|HMMA|HGMMA|IMMA)\b")
_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][\w.]*)([^;]*);")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass(frozen=True)
class Instruction:
    opcode: str  # with its modifiers: LDG.E.128.CONSTANT
    operands: str
    predicated: bool


@dataclass(frozen=True)
class Sass:
    """A disassembled kernel; every label stands for the index of the instruction after it."""

    code: tuple[Instruction, ...]
    labels: dict[str, int]

    def count(self, pattern: str) -> int:
        """Instructions whose opcode the regular expression matches from its start."""
        return count(Counter(i.opcode for i in self.code), pattern)

    def before(self, pattern: str) -> list[Instruction]:
        """What can be executed before the first instruction of such an opcode; all, if some path has none.

        A predicated one does not count, since it may not be executed.
        """
        reached: set[int] = set()
        stack = [0]
        while stack:
            at = stack.pop()
            stops = re.match(pattern, self.code[at].opcode) and not self.code[at].predicated
            if at not in reached and not stops:
                reached.add(at)
                stack += _successors(self, at)
        return [self.code[at] for at in sorted(reached)]

    def main_loop(self) -> Counter[str]:
        """Opcodes of the main loop; empty for a kernel without tensor instructions."""
        bodies = [set(body) for body in natural_loops(self)]
        tensor = [body for body in bodies if any(TENSOR.match(self.code[i].opcode) for i in body)]
        innermost = [body for body in tensor if not any(other < body for other in tensor)]
        loops = [Counter(self.code[i].opcode for i in body) for body in innermost]
        return max(loops, key=lambda loop: (count(loop, TENSOR.pattern), -loop.total()), default=Counter())


def count(opcodes: Counter[str], pattern: str) -> int:
    """Of how many instructions the regular expression matches the opcode, from its start."""
    return sum(n for opcode, n in opcodes.items() if re.match(pattern, opcode))


def read_sass(listing: str) -> Sass:
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(code)
        elif found := _LINE.search(line):
            code.append(Instruction(found[1], found[2].strip(), "@" in line.split(found[1])[0]))
    if not code:
        raise BuildError("no instructions in the disassembly", got=listing[:200])
    return Sass(tuple(code), labels)


def natural_loops(sass: Sass) -> list[list[int]]:
    """Instruction indices of each natural loop: header, and what reaches its back edges."""
    successors = [_successors(sass, at) for at in range(len(sass.code))]
    starts = _block_starts(successors)
    block_of = {at: block for block, at in enumerate(starts)}
    ends = [*starts[1:], len(successors)]
    edges = [[block_of[at] for at in successors[end - 1]] for end in ends]
    predecessors: list[list[int]] = [[] for _ in edges]
    for source, targets in enumerate(edges):
        for target in targets:
            predecessors[target].append(source)
    dominators = _dominators(edges, predecessors)
    bodies: dict[int, set[int]] = {}
    for source, targets in enumerate(edges):
        for header in targets:
            if source in dominators and header in dominators[source]:
                body = bodies.setdefault(header, {header})
                _absorb(source, body, predecessors)
    return [
        [i for block in sorted(body) for i in range(starts[block], ends[block])] for body in bodies.values()
    ]


def _successors(sass: Sass, at: int) -> list[int]:
    instruction = sass.code[at]
    base = instruction.opcode.split(".")[0]
    following = [at + 1] if at + 1 < len(sass.code) else []
    if base in ("EXIT", "RET"):
        return following if instruction.predicated else []
    if base in ("BRA", "CALL"):
        target = _TARGET.search(instruction.operands)
        # A uniform branch carries its condition as an operand: BRA.U UP0, `(...)
        conditional = instruction.predicated or base == "CALL" or "P" in instruction.operands.split("`")[0]
        jump = [sass.labels[target[1]]] if target and sass.labels[target[1]] < len(sass.code) else []
        return jump + (following if conditional else [])
    return following


def _block_starts(successors: Sequence[Sequence[int]]) -> list[int]:
    starts = {0}
    for at, targets in enumerate(successors):
        if list(targets) != [at + 1]:
            starts.update(targets)
            if at + 1 < len(successors):
                starts.add(at + 1)
    return sorted(starts)


def _dominators(edges: list[list[int]], predecessors: list[list[int]]) -> dict[int, set[int]]:
    """Blocks that every path from the entry to a block goes through (unreachable ones left out)."""
    order, seen, stack = [], {0}, [(0, iter(edges[0]))]
    while stack:
        block, rest = stack[-1]
        for target in rest:
            if target not in seen:
                seen.add(target)
                stack.append((target, iter(edges[target])))
                break
        else:
            order.append(block)
            stack.pop()
    order.reverse()
    dominators = {block: set(order) for block in order}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            known = [dominators[p] for p in predecessors[block] if p in dominators]
            new = set.intersection(*known) | {block}
            if new != dominators[block]:
                dominators[block], changed = new, True
    return dominators


def _absorb(source: int, body: set[int], predecessors: list[list[int]]) -> None:
    stack = [source]
    while stack:
        block = stack.pop()
        if block not in body:
            body.add(block)
            stack.extend(predecessors[block])
