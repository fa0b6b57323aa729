//! A checker of the fate of each request, and of each batch that a slot is granted.

use std::collections::{BTreeMap, BTreeSet};

use downbeat_core::{BatchId, DeviceId, ModelId, RequestId, Time};

/// The ending of an accepted request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// The request was answered.
    Replied,
    /// The scheduler dropped the request.
    Dropped,
    /// The client went away while the request was still in the system.
    Cancelled,
    /// The request was answered with an error.
    Failed(Failure),
}

/// The reason for an error answer: only a fault may be one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Failure {
    /// The device of this number was lost with the request on board.
    Lost(usize),
    /// The batch came to a device, by number, that had lost the slot or the model meanwhile.
    Refused(usize),
}

/// Checks each request, and each batch that a slot is granted, by the messages to and from the
/// schedulers alone. Each failure panics and prints the seed.
///
/// An accepted request ends exactly once. A request is answered with an error only if its device is
/// lost, or has changed since its batch was sent. A batch has members of one model, each in one
/// batch only, and as many items as it states. A slot has one batch, with a network two. At the end
/// no request and no batch is left.
#[derive(Debug)]
pub struct Ledger {
    seed: u64,
    /// All requests, by id.
    requests: Vec<KnownRequest>,
    open: u64,
    /// The batches that each slot was granted and has not completed.
    slots: BTreeMap<DeviceId, Vec<BatchId>>,
    /// The most batches that a slot may have.
    depth: usize,
    lost: BTreeSet<usize>,
    /// Devices whose slots or models have changed, or that were lost.
    changed: BTreeSet<usize>,
}

#[derive(Clone, Copy, Debug)]
struct KnownRequest {
    model: ModelId,
    size: u32,
    /// True once the request is in a batch of the cluster's scheduler.
    batched: bool,
    /// `None` while the request is in the system.
    ending: Option<Ending>,
    /// `None` until its scheduler accepts or refuses the request.
    accepted: Option<bool>,
}

impl Ledger {
    /// Makes the ledger of a run with this seed. `ahead`: a busy slot may be sent its next batch.
    pub fn new(seed: u64, ahead: bool) -> Self {
        Ledger {
            seed,
            requests: Vec::new(),
            open: 0,
            slots: BTreeMap::new(),
            depth: if ahead { 2 } else { 1 },
            lost: BTreeSet::new(),
            changed: BTreeSet::new(),
        }
    }

    /// Records a request that is handed in. Requests count from zero.
    pub fn request(&mut self, now: Time, id: RequestId, model: ModelId, size: u32) {
        assert!(id.0 == self.requests.len() as u64, "seed {}, {now}: the world counts its requests", self.seed);
        self.requests.push(KnownRequest { model, size, batched: false, ending: None, accepted: None });
        self.open += 1;
    }

    fn known(&mut self, now: Time, id: RequestId) -> &mut KnownRequest {
        let seed = self.seed;
        let known = self.requests.get_mut(id.0 as usize);
        known.unwrap_or_else(|| panic!("seed {seed}, {now}: {id} was never there"))
    }

    /// Records that the request is accepted or refused.
    pub fn taken(&mut self, now: Time, id: RequestId, accepted: bool) {
        let seed = self.seed;
        let known = self.known(now, id);
        let before = known.accepted.replace(accepted);
        assert!(before.is_none(), "seed {seed}, {now}: it is said twice whether {id} is accepted");
        self.open -= u64::from(!accepted);
    }

    /// Records the end of a request.
    pub fn end_request(&mut self, now: Time, id: RequestId, ending: Ending) {
        let seed = self.seed;
        let known = self.known(now, id);
        assert!(known.accepted == Some(true), "seed {seed}, {now}: {id} is {ending:?} and was not accepted");
        assert!(known.ending.is_none(), "seed {seed}, {now}: {id} is {ending:?} after {:?}", known.ending);
        known.ending = Some(ending);
        self.open -= 1;
        match ending {
            Ending::Failed(Failure::Lost(device)) => {
                assert!(
                    self.lost.contains(&device),
                    "seed {seed}, {now}: {id} fails for device {device}, which is there"
                );
            }
            Ending::Failed(Failure::Refused(device)) => {
                assert!(
                    self.changed.contains(&device),
                    "seed {seed}, {now}: {id} is refused by device {device} as it was"
                );
            }
            Ending::Replied | Ending::Dropped | Ending::Cancelled => {}
        }
    }

    /// Records a batch that the cluster's scheduler sends to a slot.
    pub fn granted(
        &mut self,
        now: Time,
        slot: DeviceId,
        batch: BatchId,
        model: ModelId,
        members: &[RequestId],
        size: u32,
    ) {
        let seed = self.seed;
        let there = self.slots.entry(slot).or_default();
        assert!(!there.contains(&batch), "seed {seed}, {now}: {batch} is sent twice");
        there.push(batch);
        assert!(there.len() <= self.depth, "seed {seed}, {now}: {slot} has {there:?}");
        let mut items = 0;
        for id in members {
            let known = self.known(now, *id);
            assert!(known.model == model, "seed {seed}, {now}: {id} of {} is in {batch} of {model}", known.model);
            assert!(
                known.ending.is_none() && known.accepted == Some(true),
                "seed {seed}, {now}: {id} is in {batch} and {:?}, accepted: {:?}",
                known.ending,
                known.accepted
            );
            assert!(!known.batched, "seed {seed}, {now}: {id} is in {batch} and in another");
            known.batched = true;
            items += known.size;
        }
        assert!(items == size && size > 0, "seed {seed}, {now}: {batch} has {items} items and says {size}");
    }

    /// Records that a slot has completed a batch.
    pub fn completed(&mut self, now: Time, slot: DeviceId, batch: BatchId) {
        let there =
            self.slots.get_mut(&slot).and_then(|there| Some(there.remove(there.iter().position(|b| *b == batch)?)));
        assert!(there.is_some(), "seed {}, {now}: {slot} completes {batch}, which it does not have", self.seed);
    }

    /// Records that a device is lost, or has returned.
    pub fn lost(&mut self, device: usize, lost: bool) {
        self.changed(device);
        if lost {
            self.lost.insert(device);
        } else {
            self.lost.remove(&device);
        }
    }

    /// Records that a device's slots or models have changed.
    pub fn changed(&mut self, device: usize) {
        self.changed.insert(device);
    }

    /// Asserts at the end of the run that every request has ended.
    pub fn end(&self, now: Time) {
        let seed = self.seed;
        let is_open = |known: &KnownRequest| known.accepted != Some(false) && known.ending.is_none();
        let open = self.requests.iter().position(is_open);
        assert!(
            open.is_none(),
            "seed {seed}, {now}: {} requests never ended, the first r{}",
            self.open,
            open.unwrap_or(0)
        );
        assert!(
            self.slots.values().all(Vec::is_empty),
            "seed {seed}, {now}: slots still have batches: {:?}",
            self.slots
        );
    }
}
