"""Reads the text of a compiled module: instructions, loops, and how often each instruction runs.

XLA's own `cost_analysis` counts a loop's body once, whatever its trip count, so the plan counts by
itself: `executed` walks a module and gives every instruction with the number of its runs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_ITEM_BITS = {"pred": 8, "token": 0, "opaque": 0}
_NAME = r"[\w.\-]+"
_SHAPE = re.compile(r"(\w+)\[([\d,<=]*)\](\{[^}]*\})?")
_HEADER = re.compile(rf"(ENTRY )?%?({_NAME}) \(.*\{{$")
_INSTRUCTION = re.compile(rf"\s+(ROOT )?%?({_NAME}) = ")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array: its type, its dimensions, and whether it lies in memory outside the chip's core.

    Attributes:
        dtype: "f32", "bf16", "s32", ...
        dims: sizes.
        in_hbm: False for a buffer that the TPU compiler put into on-chip memory (`S(1)`).
    """

    dtype: str
    dims: tuple[int, ...]
    in_hbm: bool = True

    @property
    def bytes(self) -> int:
        """Size in memory, without the padding of tiles."""
        digits = re.search(r"\d+", self.dtype)
        bits = _ITEM_BITS.get(self.dtype) if self.dtype in _ITEM_BITS else int(digits[0])  # type: ignore[index]
        return -(-math.prod(self.dims) * (bits or 0) // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: without the "%".
        opcode: "fusion", "while", "all-reduce", ...
        shapes: its result; several arrays for a tuple, nested ones flattened.
        operands: names of what it takes.
        arguments: the text between the opcode's parentheses (a constant's value).
        attributes: the text after them.
        is_root: whether it is the computation's result.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool

    def attribute(self, name: str) -> str | None:
        """Returns the value of `name=value`, braces or brackets included, or None."""
        match = re.search(rf"(?:^|, ){name}=", self.attributes)
        return _value(self.attributes, match.end()) if match else None

    @property
    def called(self) -> dict[str, tuple[str, ...]]:
        """Names of the computations that it calls, by the attribute that names them."""
        found = {}
        for key in ("calls", "body", "condition", "to_apply", "called_computations"):
            if value := self.attribute(key):
                found[key] = tuple(re.findall(rf"%?({_NAME})", value))
        for key in ("branch_computations", "true_computation", "false_computation"):
            if value := self.attribute(key):
                branches = tuple(re.findall(rf"%?({_NAME})", value))
                found["branches"] = found.get("branches", ()) + branches
        return found


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Its instructions by their name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(i for i in self.instructions if i.is_root)

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions whose results one of its instructions takes."""
        return [self.by_name[name] for name in instruction.operands if name in self.by_name]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: its computations, and the name of the one that it begins with."""

    computations: dict[str, Computation]
    entry: str


@dataclasses.dataclass(frozen=True)
class Executed:
    """An instruction that runs as one operation, and how often it does in one run of the program.

    Attributes:
        instruction: the instruction.
        computation: where it stands.
        count: number of runs, or 1 for each time that a loop of unknown length is entered.
        in_unknown_loop: whether a loop around it has a length that the text does not tell.
    """

    instruction: Instruction
    computation: Computation
    count: int
    in_unknown_loop: bool = False


def numpy_name(dtype: str) -> str:
    """Returns NumPy's name of a type: "f32" is "float32"."""
    if dtype == "pred":
        return "bool"
    kinds = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint"}
    kind = dtype.rstrip("0123456789")
    return f"{kinds[kind]}{dtype[len(kind) :]}"


def parse(text: str) -> Module:
    """Parses the text of a compiled module (`jax.stages.Compiled.as_text()`)."""
    computations: dict[str, Computation] = {}
    entry = name = ""
    instructions: list[Instruction] = []
    for line in text.splitlines():
        if line.startswith("}"):
            computations[name] = Computation(name, tuple(instructions))
            instructions = []
        elif match := _INSTRUCTION.match(line):
            instructions.append(_instruction(line, match))
        elif match := _HEADER.match(line):
            name = match[2]
            entry = name if match[1] else entry
    return Module(computations, entry)


def _instruction(line: str, match: re.Match[str]) -> Instruction:
    start = match.end()
    # A tuple's shape holds spaces, an array's none.
    end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    opening = line.index("(", end)
    closing = _closing(line, opening)
    arguments = line[opening + 1 : closing - 1]
    return Instruction(
        name=match[2],
        opcode=line[end:opening].strip(),
        shapes=tuple(_shapes(line[start:end])),
        operands=tuple(re.findall(rf"%({_NAME})", arguments)),
        arguments=arguments,
        attributes=line[closing:].removeprefix(", "),
        is_root=bool(match[1]),
    )


def _shapes(text: str) -> Iterator[Shape]:
    for dtype, dims, layout in _SHAPE.findall(text):
        sizes = tuple(int(size.lstrip("<=")) for size in dims.split(",") if size)
        yield Shape(dtype, sizes, in_hbm="S(" not in layout)


def _closing(text: str, start: int) -> int:
    """Returns the index after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"unbalanced parentheses: {text[start : start + 80]!r}")


def _value(text: str, start: int) -> str:
    if text.startswith("mesh[", start):  # replica groups, which hold a comma of their own
        return text[start : text.index("}", start) + 1]
    depth = 0
    for index in range(start, len(text)):
        character = text[index]
        depth += (character in "{[(") - (character in "}])")
        if depth < 0 or (depth == 0 and text.startswith(", ", index)):
            return text[start:index]
    return text[start:]


def executed(module: Module) -> Iterator[Executed]:
    """Yields what one run of the program executes, loops' bodies with their trip counts.

    A fusion is one operation and is not looked into; of a conditional's branches the largest
    counts.
    """
    yield from _executed(module, module.computations[module.entry], 1, False)


def _executed(
    module: Module, computation: Computation, count: int, unknown: bool
) -> Iterator[Executed]:
    for instruction in computation.instructions:
        called = instruction.called
        if instruction.opcode == "while":
            trips = trip_count(module, computation, instruction)
            inner, lost = count * (1 if trips is None else trips), unknown or trips is None
            for key in ("condition", "body"):
                for name in called[key]:
                    yield from _executed(module, module.computations[name], inner, lost)
        elif instruction.opcode == "conditional":
            branches = [module.computations[name] for name in called["branches"]]
            yield from _executed(
                module, max(branches, key=lambda b: len(b.instructions)), count, unknown
            )
        elif instruction.opcode in ("call", "async-start") and called:
            for name in called.get("to_apply", called.get("calls", ())):
                yield from _executed(module, module.computations[name], count, unknown)
        yield Executed(instruction, computation, count, unknown)


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Returns how often a loop's body runs: as the compiler wrote it down, or by its condition.

    A condition is understood where it asks whether one number of the loop's state is less than a
    constant, and the number starts at a constant and rises by one. None otherwise.
    """
    if match := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(match[1])
    condition = module.computations[loop.called["condition"][0]]
    body = module.computations[loop.called["body"][0]]
    test = condition.root
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    index, bound = condition.operands(test)
    (state,) = computation.operands(loop)
    if state.opcode != "tuple" or index.opcode != "get-tuple-element":
        return None
    place = int(index.attribute("index") or 0)
    start = _constant(computation, state.operands[place])
    step = body.by_name[body.root.operands[place]]
    steps = [_constant(body, name) for name in step.operands] if step.opcode == "add" else []
    limit = _constant(condition, bound.name)
    if start is None or limit is None or 1 not in steps:
        return None
    return max(limit - start, 0)


def _constant(computation: Computation, name: str) -> int | None:
    """Returns the whole number that a name stands for, through copies of it."""
    value = computation.by_name[name]
    while value.opcode in ("copy", "copy-start", "copy-done", "bitcast"):
        value = computation.by_name[value.operands[0]]
    is_number = value.opcode == "constant" and value.arguments.lstrip("-").isdigit()
    return int(value.arguments) if is_number else None
