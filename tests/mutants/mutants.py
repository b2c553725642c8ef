"""The faults that ``make mutants`` plants: edits of product code that its author might have got wrong."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault in one file.

    Attributes:
      name: room and a few words, to choose it by.
      file: from the root of the project.
      old: the text that is replaced, which the file has once.
      new: the text with the fault.
      fault: the consequence, with the faulty code as subject.
    """

    name: str
    file: str
    old: str
    new: str
    fault: str


MUTANTS = (
    Mutant(
        "trace-donated-batch",
        "mpmd/compiler/trace/fed_back.py",
        "batches = _find_batches(step, live) - set(itertools.compress(arguments, donated))",
        "batches = _find_batches(step, live)",
        "takes donated state of each row for a batch, which no step returns",
    ),
    Mutant(
        "trace-nested-loop",
        "mpmd/compiler/trace/check_loop.py",
        'elif eqn.primitive.name != "scan" or is_in_scope(eqn, SCOPE):',
        'elif eqn.primitive.name != "scan":',
        "accepts marks in a treduce within a treduce",
    ),
    Mutant(
        "cut-nested-callbacks",
        "mpmd/compiler/cut_layers/host_callbacks.py",
        'scans=(around, *each.params["callback"].scans)',
        'scans=(*each.params["callback"].scans, around)',
        "takes the inner one of two scans around a callback for the outer one",
    ),
    Mutant(
        "cut-reversed-stack",
        "mpmd/compiler/cut_layers/rewrite.py",
        "start, stop = length - stop, length - start",
        "pass",
        "reverses a stack of layers range by range, and leaves the ranges in their order",
    ),
    Mutant(
        "cut-shared-marks",
        "mpmd/compiler/cut_layers/number_marks.py",
        "itertools.cycle(reversed(ends))",
        "itertools.cycle(ends)",
        "numbers the backward marks of a function that is called twice in the order of its forwards",
    ),
    Mutant(
        "cut-marks-of-slices",
        "mpmd/compiler/cut_layers/slice_marks.py",
        "all(ends[stage] == numbers.slices for stage in range(last))",
        "all(ends[stage] >= numbers.slices for stage in range(last))",
        "accepts a stage with more marks than slices",
    ),
    Mutant(
        "layers-two-blocks",
        "mpmd/compiler/find_layers/repeats.py",
        "if stop - start >= period:",
        "if stop - start > period:",
        "finds no blocks where there are two",
    ),
    Mutant(
        "layers-crossing",
        "mpmd/compiler/find_layers/crossing.py",
        "changes[last + 1] -= amount",
        "changes[last] -= amount",
        "ends a value that is handed over one equation before its last reader",
    ),
    Mutant(
        "layers-merged",
        "mpmd/compiler/find_layers/find_layers.py",
        "first = i if to_next >= to_previous else i - 1",
        "first = i if to_next <= to_previous else i - 1",
        "merges a small layer with the neighbour with which it shares less",
    ),
    Mutant(
        "split-descending-sum",
        "mpmd/compiler/split/accumulate.py",
        "in sorted(by_stage.items()):",
        "in sorted(by_stage.items(), reverse=True):",
        "adds the parts of a shared weight's gradient in descending order of stages",
    ),
    Mutant(
        "split-latest-reader",
        "mpmd/compiler/split/assign.py",
        "return min(later, default=earliest)",
        "return max(later, default=earliest)",
        "assigns an equation to the last of the later stages that read its weight",
    ),
    Mutant(
        "split-keys-of-slices",
        "mpmd/compiler/split/minimize_residuals.py",
        'eqn.primitive.name == "concatenate" and not self._handed_on.isdisjoint(operands(eqn))',
        'eqn.primitive.name == "concatenate" and self._handed_on.isdisjoint(operands(eqn))',
        "keeps the keys of all slices before it once more for each slice",
    ),
    Mutant(
        "split-any-order",
        "mpmd/compiler/split/check_schedule_fits.py",
        "for accumulator in accumulators if accumulator.ordered)",
        "for accumulator in accumulators)",
        "refuses sums in schedules that do not take microbatches in ascending order",
    ),
    Mutant(
        "shard-whole-in-each",
        "mpmd/compiler/shard/make_partial_sums.py",
        "is_first = lax.broadcasted_iota(jnp.int32, shape, 0) == 0",
        "is_first = lax.broadcasted_iota(jnp.int32, shape, 0) >= 0",
        "adds a whole value to each partial sum instead of the first",
    ),
    Mutant(
        "shard-gathered-axes",
        "mpmd/compiler/shard/gather.py",
        "for axis in sharding & axes if submesh.shape[axis] > 1",
        "for axis in sharding if submesh.shape[axis] > 1",
        "gathers weights along the axes of tensor parallelism, too",
    ),
    Mutant(
        "shard-unequal-groups",
        "mpmd/compiler/shard/shard.py",
        "return len(sizes) == 1 and sizes != {1}",
        "return sizes != {1}",
        "makes partial sums along an axis of which groups have different numbers of devices",
    ),
    Mutant(
        "place-most-operands",
        "mpmd/compiler/place/place.py",
        "held[group] += size(var)",
        "held[group] += 1",
        "runs an equation on the group that has most of its operands, not most of their elements",
    ),
    Mutant(
        "place-shift",
        "mpmd/compiler/place/place_stages.py",
        "there[(group - row) % mpmd_dim]",
        "there[(row - group) % mpmd_dim]",
        "moves the stages of a later loop in the wrong direction",
    ),
    Mutant(
        "lower-fused-sums",
        "mpmd/compiler/lower/fuse.py",
        "renamed = {**names, **current}",
        "renamed = names",
        "loses the sum of the first of two tasks of a cell that add to one accumulator",
    ),
    Mutant(
        "lower-literals",
        "mpmd/compiler/lower/fingerprint.py",
        'return ("literal", _type(atom), np.asarray(atom.val).tobytes())',
        'return ("literal", _type(atom))',
        "takes tasks for equal that differ in the value of a literal",
    ),
    Mutant(
        "jaxprs-precision",
        "mpmd/compiler/jaxprs/transposed_products.py",
        '_exchanged_precision(product.params["precision"])',
        'product.params["precision"]',
        "exchanges the operands of a product and not their precisions",
    ),
    Mutant(
        "jaxprs-constants-of-branches",
        "mpmd/compiler/jaxprs/canonical.py",
        "invars = [*before, *branch.invars[:num_constants], *behind,",
        "invars = [*behind, *branch.invars[:num_constants], *before,",
        "gives a branch the constants of the branches after it before its own",
    ),
    Mutant(
        "schedules-rounds",
        "mpmd/schedules/orders.py",
        "sizes = [size + 1] * longer + [size] * (count - longer)",
        "sizes = [size] * (count - longer) + [size + 1] * longer",
        "puts the longer rounds of microbatches last",
    ),
    Mutant(
        "schedules-memory-limit",
        "mpmd/schedules/list_schedule.py",
        "return group.in_flight + reserved < limits[group.mpmd_idx]",
        "return group.in_flight + reserved <= limits[group.mpmd_idx]",
        "starts one forward more than the limit of memory allows",
    ),
    Mutant(
        "schedules-slices-apart",
        "mpmd/schedules/check.py",
        "stages[numbers.stage_of(entry.task.stage)].setdefault",
        "stages[entry.task.stage].setdefault",
        "allows a stage to be on other groups for other slices",
    ),
    Mutant(
        "schedules-residuals",
        "mpmd/schedules/dispatch.py",
        'self.in_flight -= task.kind in ("bwd", "bwdW")',
        'self.in_flight -= task.kind in ("bwd", "bwdA")',
        "counts a forward's residuals as released by bwdA",
    ),
    Mutant(
        "schedules-delay",
        "mpmd/schedules/zero_bubble.py",
        "delay=limit - 1 - warmup",
        "delay=limit - warmup",
        "runs gradients of weights one microbatch late",
    ),
    Mutant(
        "verify-donated-twice",
        "mpmd/verify/lifetimes.py",
        "if run.inputs.count(name) > 1:",
        "if run.inputs.count(name) > 2:",
        "allows a donated value to be another input of the same run",
    ),
    Mutant(
        "verify-capacity",
        "mpmd/verify/channels.py",
        "bisect.bisect_left(used_at[edge],",
        "bisect.bisect_right(used_at[edge],",
        "counts a message as read by an instruction that may not have run",
    ),
    Mutant(
        "ir-minor-axis",
        "mpmd/ir/reshard.py",
        "index, parts = index * axes[axis] + position[axis], parts * axes[axis]",
        "index, parts = index + parts * position[axis], parts * axes[axis]",
        "takes the first of the axes that shard a dimension for the minor one",
    ),
    Mutant(
        "ir-arrival-clock",
        "mpmd/ir/process_times.py",
        "arrived=w.arrived + offset)",
        "arrived=w.arrived)",
        "shifts a wait to another clock without the arrival of its message",
    ),
    Mutant(
        "memory-dropped",
        "mpmd/memory/messages.py",
        "dropped=max(dropped.get(name, end) for name in values)",
        "dropped=min(dropped.get(name, end) for name in values)",
        "counts a message as gone when the first of its values is dropped",
    ),
    Mutant(
        "memory-kept",
        "mpmd/memory/group.py",
        "changes[min(stay.dropped, end) + 1] += stay.nbytes",
        "changes[min(stay.dropped, end)] += stay.nbytes",
        "frees a received buffer one instruction early",
    ),
    Mutant(
        "simulate-queue",
        "mpmd/simulate/sharing.py",
        "self._busy[edge] = max(self._now, self._busy[edge]) + (",
        "self._busy[edge] = self._now + (",
        "sends a message over a link that another one still occupies",
    ),
    Mutant(
        "simulate-donated",
        "mpmd/simulate/plan.py",
        "growth = self._bytes(run.outputs) - self._bytes(donated)",
        "growth = self._bytes(run.outputs)",
        "counts the buffers that outputs take over twice",
    ),
    Mutant(
        "attribution-common-delay",
        "mpmd/attribution/gaps.py",
        "differences = accounts.accounts[waited].minus(of_before)",
        "differences = accounts.accounts[waited]",
        "blames a delay that the waiting group has had, too",
    ),
    Mutant(
        "runtime-donated-alias",
        "mpmd/runtime/worker.py",
        "if holders[id(value)] > 1:",
        "if holders[id(value)] > 2:",
        "donates an array that is another result, too",
    ),
    Mutant(
        "runtime-frees",
        "mpmd/runtime/operations.py",
        "self._dead.extend(values)",
        "self._dead = list(values)",
        "forgets to free values where two frees follow one another",
    ),
    Mutant(
        "runtime-aborted",
        "mpmd/runtime/inbox.py",
        "if message.step < self.step or message.step in self._aborted:",
        "if message.step < self.step:",
        "keeps messages of an aborted step",
    ),
    Mutant(
        "runtime-argument-cache",
        "mpmd/runtime/argument_cache.py",
        "is_there = all(entry.handle >=",
        "is_there = any(entry.handle >=",
        "counts on an array that only some of the groups still have",
    ),
    Mutant(
        "transports-lost-peer",
        "cluster/transports/inbox.py",
        "if groups is None or self._group_of(process) in groups:",
        "if True:",
        "ends a step for the loss of a process that takes no part in it",
    ),
    Mutant(
        "transports-window",
        "cluster/transports/window.py",
        "self._before, self._step = self._step, step",
        "self._before = self._step = step",
        "lets no sender be a step ahead of its receiver",
    ),
    Mutant(
        "transports-dropped-slot",
        "cluster/transports/shared_memory/receiver.py",
        "        self.slot.release()\n",
        "        return\n",
        "keeps the slot of a message that is dropped occupied",
    ),
    Mutant(
        "tcp-unasked-certificate",
        "cluster/tcp/credentials.py",
        "context.verify_mode = ssl.CERT_REQUIRED",
        "context.verify_mode = ssl.CERT_NONE if accepts else ssl.CERT_REQUIRED",
        "accepts a peer that shows no certificate",
    ),
    Mutant(
        "recovery-unwritten-copy",
        "cluster/recovery/journal.py",
        "if snapshot.covered.isdisjoint(self._copies):",
        "if snapshot.is_copied:",
        "commits a snapshot behind a copy that is still to be written",
    ),
    Mutant(
        "recovery-late-answer",
        "cluster/recovery/journal.py",
        "if attempt != self.attempt or mpmd_idx not in request.waiting:\n"
        "            return []\n"
        "        request.waiting.remove(mpmd_idx)\n"
        "        if isinstance",
        "if mpmd_idx not in request.waiting:\n"
        "            return []\n"
        "        request.waiting.remove(mpmd_idx)\n"
        "        if isinstance",
        "believes an answer from before the groups went back",
    ),
    Mutant(
        "recovery-lost-results",
        "cluster/recovery/journal.py",
        "lost.update(handle for each in requests for handle in each.outputs)",
        "lost.update(handle for each in requests for handle in each.inputs)",
        "runs steps again that read the results of one that has failed",
    ),
    Mutant(
        "recovery-max-failures",
        "cluster/recovery/policy.py",
        "if self._count > self._max_failures:",
        "if self._count >= self._max_failures:",
        "gives up one failure early",
    ),
    Mutant(
        "recovery-move-as-failure",
        "cluster/recovery/supervisor.py",
        "is_failure = bool(dead - self.moves.leaving)",
        "is_failure = bool(dead)",
        "counts a group that moves as a failure",
    ),
    Mutant(
        "recovery-base",
        "cluster/recovery/store.py",
        "fresh = sorted(handles - self._handles(base))",
        "fresh = sorted(handles)",
        "sends values with a snapshot that its keeper has already",
    ),
    Mutant(
        "planner-ring",
        "mpmd/planner/collectives.py",
        "return CollectiveCost(messages / size / link.bandwidth,",
        "return CollectiveCost(messages / link.bandwidth,",
        "has each message of a ring carry the whole value",
    ),
    Mutant(
        "planner-shards-on-a-node",
        "mpmd/planner/collectives.py",
        "on_a_node = min(target.num_devices, cluster.pool(target.submesh.pool).devices_per_node)",
        "on_a_node = target.num_devices",
        "counts devices of other nodes on a node's link",
    ),
    Mutant(
        "planner-first-round",
        "mpmd/planner/search/closed_forms.py",
        "return np.ceil(m / np.maximum(1, m // p))",
        "return np.floor(m / np.maximum(1, m // p))",
        "takes the shortest round of microbatches for the first",
    ),
    Mutant(
        "planner-ownership",
        "mpmd/planner/profiling/ownership.py",
        "*(extended[var] for var in labelled if size(var) == largest)",
        "*(extended[var] for var in labelled)",
        "gives a gradient that is scaled by the norm of all gradients to all layers",
    ),
    Mutant(
        "planner-roofline",
        "mpmd/planner/hardware.py",
        "of_products = np.maximum(computing, nbytes_of_products / cluster.memory_bandwidth)",
        "of_products = computing + nbytes_of_products / cluster.memory_bandwidth",
        "has products wait for memory before they compute",
    ),
    Mutant(
        "planner-entering",
        "mpmd/planner/search/memory.py",
        "temporaries = 2 * entering + within",
        "temporaries = entering + within",
        "forgets the gradients of the values that enter a layer",
    ),
    Mutant(
        "checkpoint-last-whole",
        "mpmd/checkpoint/integrity.py",
        "for number in sorted(others, reverse=True) if _is_whole",
        "for number in sorted(others) if _is_whole",
        "advises to restore the oldest whole checkpoint",
    ),
    Mutant(
        "checkpoint-grown-file",
        "mpmd/checkpoint/integrity.py",
        "if length != size:",
        "if length < size:",
        "takes a file that has grown for whole",
    ),
    Mutant(
        "checkpoint-kind-of-number",
        "mpmd/checkpoint/leaves.py",
        "is_of_kind = of_python and stored.dtype.kind == target.dtype.kind",
        "is_of_kind = of_python",
        "restores a stored float as an integer",
    ),
    Mutant(
        "checkpoint-chunks",
        "mpmd/checkpoint/saving.py",
        "chunk = tuple(map(math.gcd, *shards)) if stack else shards[0]",
        "chunk = shards[0]",
        "writes all layer ranges of a stack in chunks of the shape of the first",
    ),
)
"""Sixty faults, of every part of the project; code that moves takes its fault along."""
