//! The buffers between stages, and when a pair of them may be used (DVABatch §6.1).

use std::collections::BTreeMap;

/// The state of a buffer (DVABatch §6.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BufferState {
    /// No executor uses it.
    Available,
    /// The buffer may be written, but not read. Its content has been read, and a later stage still
    /// works on the result.
    Invalid,
    /// An executor reads the buffer: the paper's inreading.
    Reading,
    /// An executor writes the buffer: the paper's inwriting.
    Writing,
}

#[derive(Clone, Copy, Debug)]
struct Buffer {
    state: BufferState,
    /// Whether the buffer holds rows that the next stage has not begun to read. With more than two
    /// pairs, the four states alone would let an executor overwrite such rows.
    unread: bool,
}

/// The buffers of all stages. Pair `j` of executor `i` is the input buffer `(i, j)` and the output
/// buffer `(i + 1, j)`. The latter is also the input buffer of executor `i + 1`.
#[derive(Clone, Debug)]
pub struct BufferPairs {
    pairs: u16,
    /// The buffers by boundary, then by pair: the input of stage 0 first, the output of the last
    /// stage last.
    buffers: Vec<Buffer>,
    /// The parts of split batches.
    families: BTreeMap<FamilyId, Family>,
    next_family: u32,
}

/// The id of a family: the parts of one split batch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct FamilyId(u32);

/// The parts of a split batch, which share one pair and run one after another.
#[derive(Clone, Copy, Debug)]
struct Family {
    pair: u16,
    /// The stage before which the batch was split. Its input buffer holds the rows of all parts.
    before: u16,
    /// The parts that have not left the last stage.
    left: u32,
}

impl BufferPairs {
    /// `pairs` pairs for each of `stages` stages, all available.
    pub fn new(stages: u16, pairs: u16) -> Self {
        let count = (usize::from(stages) + 1) * usize::from(pairs);
        BufferPairs {
            pairs,
            buffers: vec![Buffer { state: BufferState::Available, unread: false }; count],
            families: BTreeMap::new(),
            next_family: 0,
        }
    }

    fn at(&mut self, boundary: u16, pair: u16) -> &mut Buffer {
        &mut self.buffers[usize::from(boundary) * usize::from(self.pairs) + usize::from(pair)]
    }

    fn get(&self, boundary: u16, pair: u16) -> Buffer {
        self.buffers[usize::from(boundary) * usize::from(self.pairs) + usize::from(pair)]
    }

    /// The state of the buffer that stage `boundary` reads. The buffer after the last stage holds
    /// the model's outputs.
    #[cfg(test)]
    pub fn state(&self, boundary: u16, pair: u16) -> BufferState {
        self.get(boundary, pair).state
    }

    /// Whether executor `stage` may use the pair. Its input buffer must be available, its output
    /// buffer available or invalid (DVABatch §6.1).
    pub fn is_legitimate(&self, stage: u16, pair: u16) -> bool {
        let (input, output) = (self.get(stage, pair), self.get(stage + 1, pair));
        input.state == BufferState::Available
            && matches!(output.state, BufferState::Available | BufferState::Invalid)
            && !output.unread
    }

    /// The first pair that executor `stage` may use.
    pub fn any_legitimate(&self, stage: u16) -> Option<u16> {
        (0..self.pairs).find(|pair| self.is_legitimate(stage, *pair))
    }

    /// Marks the pair as used by executor `stage`. Asserts that the executor may use it.
    pub fn begin(&mut self, stage: u16, pair: u16) {
        assert!(self.is_legitimate(stage, pair), "an executor works with a legitimate pair of buffers");
        *self.at(stage, pair) = Buffer { state: BufferState::Reading, unread: false };
        self.at(stage + 1, pair).state = BufferState::Writing;
    }

    /// Ends the use of the pair by executor `stage` of `stages`. The next executor may read the
    /// output.
    pub fn end(&mut self, stage: u16, stages: u16, pair: u16) {
        // A model's only stage has no earlier executor that would wait for its input buffer.
        let input = if stages == 1 { BufferState::Available } else { BufferState::Invalid };
        self.at(stage, pair).state = input;
        *self.at(stage + 1, pair) = Buffer { state: BufferState::Available, unread: stage + 1 < stages };
    }

    /// Lets the executor before `stage` use the pair (DVABatch §6.2, the note on figure 11).
    /// Returns false while parts of a split batch still need the pair; then try again later.
    pub fn hand_back(&mut self, stage: u16, pair: u16) -> bool {
        if self.families.values().any(|family| family.pair == pair && stage <= family.before + 1) {
            return false;
        }
        if stage > 0 {
            let buffer = self.at(stage - 1, pair);
            if buffer.state == BufferState::Invalid {
                buffer.state = BufferState::Available;
            }
        }
        true
    }

    /// Frees the output of executor `stage` in this pair. The output went into another pair, or all
    /// members have left.
    pub fn drain(&mut self, stage: u16, pair: u16) {
        self.at(stage + 1, pair).unread = false;
        if self.at(stage, pair).state == BufferState::Invalid {
            self.at(stage, pair).state = BufferState::Available;
        }
    }

    /// Splits the content of the pair before stage `before` into `parts`, which go on one after
    /// another.
    pub fn split(&mut self, before: u16, pair: u16, parts: u32) -> FamilyId {
        let id = FamilyId(self.next_family);
        self.next_family += 1;
        self.families.insert(id, Family { pair, before, left: parts });
        id
    }

    /// Handles a part of split batches that has left the last stage, so that the next part may
    /// begin. `families` has the outermost family first.
    pub fn finish(&mut self, families: &[FamilyId]) {
        for id in families.iter().rev() {
            let Some(family) = self.families.get_mut(id) else { continue };
            family.left -= 1;
            if family.left > 0 {
                let Family { before, pair, .. } = *family;
                *self.at(before, pair) = Buffer { state: BufferState::Available, unread: true };
                return;
            }
            self.families.remove(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_is_legitimate_by_the_states_of_both_buffers() {
        use BufferState::{Available, Invalid, Reading, Writing};
        for (input, output, legitimate) in [
            (Available, Available, true),
            (Available, Invalid, true),
            (Available, Reading, false),
            (Available, Writing, false),
            (Invalid, Available, false),
            (Reading, Available, false),
            (Writing, Available, false),
        ] {
            let mut pairs = BufferPairs::new(2, 1);
            pairs.at(0, 0).state = input;
            pairs.at(1, 0).state = output;
            assert_eq!(pairs.is_legitimate(0, 0), legitimate, "{input:?} {output:?}");
        }
    }

    #[test]
    fn the_example_of_figure_9() {
        // Executor 0 works with pair 0, executor 1 with pair 1, and pair 2 is free.
        let mut pairs = BufferPairs::new(2, 3);
        pairs.begin(0, 1);
        pairs.end(0, 2, 1);
        pairs.begin(1, 1);
        pairs.begin(0, 0);
        assert_eq!([pairs.state(0, 0), pairs.state(1, 0)], [BufferState::Reading, BufferState::Writing]);
        assert_eq!(pairs.state(0, 1), BufferState::Invalid, "executor 1 uses what executor 0 wrote from it");
        assert!(!pairs.is_legitimate(0, 0) && !pairs.is_legitimate(0, 1) && pairs.is_legitimate(0, 2));
        pairs.end(1, 2, 1);
        assert!(!pairs.is_legitimate(0, 1), "not before executor 1 hands it back");
        assert!(pairs.hand_back(1, 1));
        assert!(pairs.is_legitimate(0, 1));
    }
}
