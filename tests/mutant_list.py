"""The mistakes that `python -m tests.mutants` makes, by file: what is there, once; what takes its
place; and a word about what it is, where the text does not say it.

A mistake must change what a run computes, keeps, sends or costs. Messages and logs do not count,
nor what cannot be told apart from the original.
"""

Change = tuple[str, str] | tuple[str, str, str]

CHANGES: dict[str, list[Change]] = {
    # --- model ---
    "model/mask.py": [("positions.clamp(max=window - 1)", "positions.clamp(max=window)")],
    "model/documents.py": [
        ("functional.pad((part.start - first_keys).cumsum(0), (1, 0))",
         "functional.pad(part.start - first_keys, (1, 0))"),
    ],
    "model/transformer.py": [
        ("z_loss=self.z_loss if torch.is_grad_enabled() else 0.0", "z_loss=self.z_loss",
         "evaluation"),
        ("RMSNorm(config, config.dim, tp, tp.sequence_parallel) if last",
         "RMSNorm(config, config.dim, tp, False) if last", "partial"),
    ],
    "model/attention/causal.py": [
        ("self.key_norm = RMSNorm(config, head_dim, tp, gradient_is_partial=True)",
         "self.key_norm = RMSNorm(config, head_dim, tp, tp.sequence_parallel)", "partial"),
    ],
    "model/positions.py": [
        ("positions.to(exact(dtype)).unsqueeze(-1)", "positions.to(dtype).unsqueeze(-1)"),
        ("(original / (2 * math.pi))", "(original / math.pi)"),
        ("key = window, head_dim, kernel", "key = None, head_dim, kernel", "cache"),
    ],
    "model/initialise.py": [('f"{seed}:{name}:{block}"', 'f"{seed}:{block}"')],
    "model/router/_base.py": [
        ("wide_product(x, weight.t(), exact)", "(x @ weight.t()).to(exact)"),
        ("gradient_is_partial=tp.sequence_parallel", "gradient_is_partial=False"),
        ("len(logits) // len(counts) * self.ep.parts", "len(logits) // len(counts)", "parts"),
        ("reduce(all_reduce, self.ep.sequence, counts)",
         "reduce(all_reduce, self.ep.sequence[:1], counts)", "group"),
        ("/ (self.k * length) / length", "/ (self.k * length)"),
        ("config.router_z_weight / (global_sequences * length)",
         "config.router_z_weight / global_sequences"),
    ],
    "model/router/sigmoid_bias.py": [
        ("logits.sigmoid() + self.bias", "logits.sigmoid() - self.bias"),
    ],
    "model/kernels/attention.py": [("else window - 1, 0)", "else window, 0)")],
    "model/kernels/norm_rotary.py": [("2, keep_dims=True) / (2 * HALF)", "2, keep_dims=True)")],
    "model/kernels/rms_norm.py": [
        ("functional.rms_norm(x.to(wide.dtype), (x.shape[-1],), wide, eps)",
         "functional.rms_norm(x.to(wide.dtype), (x.shape[-1],), wide)"),
        ("/ width + tl.full((), EPS, ACC))", "/ width)", "kernel"),
    ],
    "model/kernels/cross_entropy.py": [
        ("(totals * (peaks - peak).exp()).sum(0)", "totals.sum(0)"),
        ("scale * (1 + 2 * z_loss * row.lse) / row.total",
         "scale * (1 + z_loss * row.lse) / row.total"),
    ],
    "model/linear_cross_entropy.py": [
        ("gradient.adds else exact(x.dtype)", "gradient.adds else x.dtype"),
        ("dloss == 1", "dloss == dloss"),
    ],
    "model/kernels/grouped_matmul.py": [
        ("out.addmm_(dy_rows.t(), rows, beta=beta)", "out.addmm_(dy_rows.t(), rows)", "flag"),
    ],
    "model/kernels/weighted_swiglu.py": [
        ("        dw += dy * silu * u\n        dy *= w\n",
         "        dy *= w\n        dw += dy * silu * u\n", "order"),
    ],
    "model/kernels/adamw.py": [("step += applied", "step += 1")],
    "model/kernels/gradient_norm.py": [
        ("dtype=torch.float64).square() / count", "dtype=torch.float64).square()"),
    ],
    # --- parallel ---
    "parallel/collectives.py": [
        ("out = x.clone(memory_format=torch.contiguous_format)", "out = x.contiguous()",
         "in place"),
        ("        for work in self._works:\n            work.wait()\n        self._works = []\n",
         "        self._works = []\n", "wait"),
    ],
    "parallel/weight_gradient.py": [
        ("torch.promote_types(reduce, compute) if zero_stage < 2",
         "compute if zero_stage < 2", "dtype"),
        ("dy.to(self.dtype) if self.adds else dy", "dy", "dtype"),
    ],
    "parallel/layer.py": [
        ("range(rank * self.count // tp, rank * self.count // tp + 1)",
         "range(rank % self.count, rank % self.count + 1)"),
    ],
    "parallel/tensor.py": [
        ("(ONE_RANK, tp.group if gathers else ONE_RANK)", "(ONE_RANK, ONE_RANK)"),
        ("gradient_is_partial=shared", "gradient_is_partial=False"),
    ],
    "parallel/context.py": [
        ("torch.promote_types(gradients[0].dtype, torch.float32)", "gradients[0].dtype"),
        ("    high[:unseen].zero_()\n", "", "uninitialised"),
    ],
    "parallel/dispatch/all_to_all.py": [
        ("local_places = places_in(local_order)", "local_places = local_order"),
        ("            if not self.kept.has_outputs:\n                rows.start_there(*tensors)\n",
         "            rows.start_there(*tensors)\n", "sent again"),
    ],
    "parallel/dispatch/expert_sum.py": [("counts[mine].cumsum(0)", "counts.cumsum(0)[mine]")],
    "parallel/mesh.py": [("of_tokens[of_rows]", "of_tokens[of_rows[-1:]]", "group")],
    "parallel/data.py": [
        ("set_reshard_after_backward(last or self.reshard_weights,",
         "set_reshard_after_backward(self.reshard_weights,"),
        ("self.reduce_each_microbatch = zero_stage >= 2",
         "self.reduce_each_microbatch = zero_stage > 2"),
        ("unit.set_requires_all_reduce(last or adds, recurse=False)",
         "unit.set_requires_all_reduce(True, recurse=False)", "group"),
    ],
    "parallel/fsdp_units.py": [
        ("reduce_dtype=reduce_dtype, cast_forward_inputs",
         "reduce_dtype=compute_dtype, cast_forward_inputs"),
        ("for view in mesh.fsdp.values()", "for view in [mesh.fsdp[False]]", "group"),
    ],
    "parallel/placement.py": [
        ("for axis in reversed(range(mesh.ndim)):", "for axis in range(mesh.ndim):"),
    ],
    "parallel/pipeline/tied.py": [("        gradients[1].copy_(gradients[0])\n", "", "sum")],
    "parallel/pipeline/schedules.py": [
        ("ahead = (v - 1) * group + (p - 1 - r)", "ahead = (v - 1) * group + (p - r)", "memory"),
        ("            if i >= r:\n                rank.backward_weight(r)\n"
         "        rank.backward_weight(r, times=min(m, r))",
         "        rank.backward_weight(r, times=m)", "bubble"),
    ],
    "parallel/pipeline/lower.py": [("    messages.sort()\n", "", "order")],
    "parallel/pipeline/runner.py": [
        ("total = result.detach() if total is None else total + result.detach()",
         "total = result.detach()"),
    ],
    "parallel/pipeline/transfer.py": [
        ("        work.wait()\n        return tensor", "        return tensor", "wait"),
    ],
    # --- training ---
    "training/step.py": [
        ("(targets != IGNORE).sum()", "(targets == targets).sum()"),
        ("dist.all_reduce(num_targets, group=self.mesh.batch.group)",
         "dist.all_reduce(num_targets, group=self.mesh.loss.group)", "group"),
        ("for view in (self.mesh.loss, self.mesh.pp):",
         "for view in (self.mesh.batch, self.mesh.pp):", "group"),
        ("sum_over_tp(self.weights, self.mesh.tp.group)",
         "sum_over_tp(self.weights, self.mesh.pp.group)", "group"),
        ("self.optimizer.step(lr, norm_or_inf,", "self.optimizer.step(lr, norm,", "guard"),
        ("for weight in self.weights if not weight.is_copy]", "for weight in self.weights]"),
        ("            self.balance.begin(scale)\n", "            pass\n", "counts"),
    ],
    "training/guard.py": [
        ("(self.bad_in_a_row + 1) * bad", "self.bad_in_a_row + bad"),
        ("torch.where(loss.isfinite(), loss, math.nan)", "torch.where(bad, math.nan, loss)"),
    ],
    "training/balance.py": [
        ("for view in (self.mesh.loss, self.mesh.tp, self.mesh.pp):",
         "for view in (self.mesh.loss, self.mesh.pp):", "group"),
        ("torch.where(norm.isfinite(), rate * below, 0.0)", "rate * below", "guard"),
    ],
    "training/learning_rate.py": [
        ("config.lr * (step + 1) / config.warmup_steps", "config.lr * step / config.warmup_steps"),
        ("left = steps - step", "left = steps - step - 1"),
    ],
    "training/gradient.py": [
        ("dist.all_reduce(total)", "dist.all_reduce(total, group=mesh.loss.group)", "group"),
    ],
    "settings/config.py": [
        ("if self.optimizer.pure_bfloat16 else exact",
         "if self.optimizer.pure_bfloat16 else compute", "dtype"),
    ],
    "settings/data_stages.py": [
        ("begin - (tokens - value) // per_step", "begin + (value - tokens) // per_step"),
    ],
    "training/optimizers/__init__.py": [
        ("[decay if each.spec.group.decays else 0.0 for each in weights]",
         "[decay for each in weights]"),
        ("if axis.cuts_beside(dims):", "if axis.size > 1:", "other rows"),
        ("(self.dtype.itemsize if self.dtype else itemsize)", "itemsize", "dtype"),
    ],
    "training/qk_clip.py": [
        ("group=self.mesh.loss.group", "group=self.mesh.cp.group", "group"),
        ("self.part.mul_(factors", "self.part.mul(factors", "in place"),
    ],
    "training/optimizers/adamw.py": [
        ("region[0].start * row + columns.start * inner,", "region[0].start * row,", "rounding"),
    ],
    # --- data ---
    "data/sampler.py": [
        ('f"seed {seed} source {source} epoch {epoch}"', 'f"seed {seed} source {source}"'),
        ("self.num_windows[s], self.seed, self._numbers[s], int(e)",
         "self.num_windows[s], self.seed, s, int(e)", "stages"),
        ("max(num_tokens - 1, 0) // seq_len", "num_tokens // seq_len"),
        ("(merged[-1][0], max(end, merged[-1][1]))", "(merged[-1][0], end)"),
        ("        position = end\n", "        position = end + 1\n"),
    ],
    "data/loader.py": [
        ("self.next_sample = after", "self.next_sample = self._ahead[-1][1]", "resume"),
        ("(mine >= limit)", "(mine > limit)"),
    ],
    # --- saving ---
    "runtime/checkpoint/save.py": [
        ("seconds_between(begin, end) if device == \"cuda\" else 0.0", "0.0", "wait"),
        ("        began = time.perf_counter()\n        self.wait()\n",
         "        began = time.perf_counter()\n", "wait"),
        ("            stall += max(self._agree(copied))\n", "", "finite"),
        ("() if parse_trainer(newest).bad_in_a_row else old", "old"),
        ("updates=int(self.train.optimizer.updates.item())", "updates=step"),
        ("        sync(partial)\n", "", "fsync"),
    ],
    "runtime/checkpoint/folder.py": [("[:-keep_last]", "[: -keep_last - 1]")],
    "runtime/checkpoint/manifest.py": [
        ('hashlib.file_digest(file, "sha256")', "hashlib.sha256(file.read(1 << 20))", "hash"),
    ],
    "runtime/files.py": [("        os.fsync(file.fileno())\n", "", "fsync")],
    "runtime/checkpoint/rollback.py": [
        ("too_many = bad >= most or (bad > 0 and run.changes_data_stage)", "too_many = bad >= most",
         "boundary"),
    ],
    "runtime/checkpoint/saving.py": [
        ("self.is_due |= self.interval.is_due(run)", "self.is_due = self.interval.is_due(run)"),
        ("good = not run.train.guard.bad_in_a_row or run.is_last", "good = True", "guard"),
    ],
    "runtime/checkpoint/lease.py": [
        ("        self._require()\n        try:\n            os.replace(",
         "        try:\n            os.replace(", "fencing"),
    ],
    "runtime/checkpoint/load.py": [("        copy.copy_(source)\n", "        pass\n", "tied")],
}  # fmt: skip
