//! Compares two ways to give memory to a model's intermediate tensors (activations). Each tensor
//! has memory of its own, or all share one arena by a static plan.
//!
//! A plan gives every intermediate tensor an offset in one arena before anything runs. It uses the
//! times of the tensor's write and last read (E²bird §6.2). Engines make such plans themselves.
//! This module only computes how much memory a plan saves.

/// Bytes of the intermediate tensors of one item, on one lane.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Activations {
    /// The bytes if each tensor had memory of its own for the whole run.
    pub separate: u64,
    /// The arena of a static plan.
    pub planned: u64,
    /// The most that is alive at once: no plan can be smaller.
    pub alive: u64,
    /// Bytes that the engine's own arena held after the run, if the engine tells. The engine uses
    /// its own plan instead of this one.
    pub engine: Option<u64>,
}

/// An intermediate tensor: written by operator `from`, last read by operator `to` (or kept to the
/// end).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetime {
    /// Its bytes.
    pub bytes: u64,
    /// The operator that writes it.
    pub from: usize,
    /// The last operator that reads it; not before `from`.
    pub to: usize,
}

impl Lifetime {
    fn overlaps(&self, other: &Lifetime) -> bool {
        self.from <= other.to && other.from <= self.to
    }
}

/// Offsets in one arena with which tensors that are alive at once do not overlap. The largest
/// tensor comes first. Each gets the tightest gap that the tensors before it leave (greedy by size,
/// best fit). Offsets are multiples of `alignment`, in bytes.
pub fn plan(lifetimes: &[Lifetime], alignment: u64) -> Vec<u64> {
    let alignment = alignment.max(1);
    let mut order: Vec<usize> = (0..lifetimes.len()).collect();
    order.sort_by_key(|i| lifetimes.get(*i).map(|l| (std::cmp::Reverse(l.bytes), l.from, *i)));
    let mut offsets = vec![0; lifetimes.len()];
    let mut placed: Vec<(u64, u64, Lifetime)> = Vec::new();
    for index in order {
        let Some(lifetime) = lifetimes.get(index) else { continue };
        let mut best: Option<(u64, u64)> = None;
        let mut free = 0u64;
        for (start, end, _) in placed.iter().filter(|(_, _, other)| other.overlaps(lifetime)) {
            if let Some(gap) = start.checked_sub(free).filter(|gap| *gap >= lifetime.bytes)
                && best.is_none_or(|(tightest, _)| gap < tightest)
            {
                best = Some((gap, free));
            }
            free = free.max(end.next_multiple_of(alignment));
        }
        let offset = best.map_or(free, |(_, offset)| offset);
        if let Some(place) = offsets.get_mut(index) {
            *place = offset;
        }
        let at = placed.partition_point(|(start, _, _)| *start <= offset);
        placed.insert(at, (offset, offset + lifetime.bytes, *lifetime));
    }
    offsets
}

impl Activations {
    /// Works out a plan for tensors with these lifetimes.
    pub fn of(lifetimes: &[Lifetime]) -> Activations {
        let offsets = plan(lifetimes, crate::tensor::ALIGNMENT as u64);
        let planned = lifetimes.iter().zip(&offsets).map(|(l, offset)| offset + l.bytes).max().unwrap_or(0);
        let end = lifetimes.iter().map(|l| l.to).max().map_or(0, |to| to + 1);
        let alive_at = |at: usize| lifetimes.iter().filter(|l| l.from <= at && at <= l.to).map(|l| l.bytes).sum();
        let alive = (0..end).map(alive_at).max().unwrap_or(0);
        Activations { separate: lifetimes.iter().map(|l| l.bytes).sum(), planned, alive, engine: None }
    }
}
