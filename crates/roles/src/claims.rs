//! Tokens that show a frontend which claims the leader has planned.
//!
//! Example: the leader plans batch 7 on backend b, with requests 3 and 4 of frontend f. The plan has
//! a token for f. Backend b sends the token with its claim, and f computes the token anew. A backend
//! that claims other requests, or another backend's batch, does not know the token.
//!
//! Each frontend has a key of its own in each epoch, so no frontend makes tokens for
//! others. A token is SipHash-2-4, keyed and 64 bits long. Each guess costs its sender a message.

use std::fmt;
use std::hash::Hasher as _;

use serde::{Deserialize, Serialize};
use siphasher::sip::SipHasher24;
use siphasher::sip128::{Hasher128 as _, SipHasher24 as LongHasher};

use crate::epoch::Epoch;
use crate::ids::{BatchKey, NodeId};

/// The random bytes from which a scheduler makes the [`ClaimKey`]s of its frontends. The
/// process draws the bytes once, and no other process learns them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ClaimSecret(pub [u8; 16]);

/// The key of one frontend's tokens in one epoch. Only the leader and that frontend know the key.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimKey(u64, u64);

/// Shows that the leader has planned these requests of a frontend, in this batch on this backend.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ClaimToken(pub u64);

impl ClaimSecret {
    /// The key of a frontend in an epoch.
    pub fn key(&self, epoch: Epoch, frontend: NodeId) -> ClaimKey {
        let mut hasher = LongHasher::new_with_key(&self.0);
        hasher.write_u64(epoch.number);
        hasher.write_u64(epoch.rank.into());
        hasher.write_u64(frontend.0);
        let hash = hasher.finish128();
        ClaimKey(hash.h1, hash.h2)
    }
}

impl ClaimKey {
    /// The token of a batch's requests at the key's frontend, in the order of the plan.
    pub fn token(self, batch: BatchKey, backend: NodeId, numbers: impl IntoIterator<Item = u64>) -> ClaimToken {
        let mut token = TokenOf::new(self, batch, backend);
        numbers.into_iter().for_each(|number| token.add(number));
        token.finish()
    }
}

/// A token under way. Numbers of requests are added one by one.
#[derive(Clone, Debug)]
pub(super) struct TokenOf(SipHasher24);

impl TokenOf {
    /// The token of a batch without requests.
    pub fn new(key: ClaimKey, batch: BatchKey, backend: NodeId) -> Self {
        let mut hasher = SipHasher24::new_with_keys(key.0, key.1);
        let BatchKey { epoch, batch } = batch;
        for word in [epoch.number, epoch.rank.into(), batch.0, backend.0] {
            hasher.write_u64(word);
        }
        TokenOf(hasher)
    }

    /// Adds a request.
    pub fn add(&mut self, number: u64) {
        self.0.write_u64(number);
    }

    /// The token of all added requests.
    pub fn finish(&self) -> ClaimToken {
        ClaimToken(self.0.finish())
    }
}

impl fmt::Debug for ClaimSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClaimSecret")
    }
}

impl fmt::Debug for ClaimKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClaimKey")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use downbeat_core::ids::BatchId;

    use super::*;

    #[test]
    fn every_part_of_a_plan_changes_its_token() {
        let epoch = Epoch { number: 3, rank: 1 };
        let batch = BatchKey { epoch, batch: BatchId(7) };
        let secret = ClaimSecret([5; 16]);
        let key = secret.key(epoch, NodeId(1));
        let of_epoch = |epoch| BatchKey { epoch, ..batch };
        let tokens = [
            key.token(batch, NodeId(2), [3, 4]),
            key.token(batch, NodeId(2), [4, 3]),
            key.token(batch, NodeId(2), [3]),
            key.token(batch, NodeId(2), [3, 4, 5]),
            key.token(batch, NodeId(9), [3, 4]),
            key.token(BatchKey { batch: BatchId(8), ..batch }, NodeId(2), [3, 4]),
            key.token(of_epoch(Epoch { number: 4, ..epoch }), NodeId(2), [3, 4]),
            key.token(of_epoch(Epoch { rank: 0, ..epoch }), NodeId(2), [3, 4]),
            secret.key(epoch, NodeId(8)).token(batch, NodeId(2), [3, 4]),
            secret.key(Epoch { number: 4, ..epoch }, NodeId(1)).token(batch, NodeId(2), [3, 4]),
            secret.key(Epoch { rank: 0, ..epoch }, NodeId(1)).token(batch, NodeId(2), [3, 4]),
            ClaimSecret([6; 16]).key(epoch, NodeId(1)).token(batch, NodeId(2), [3, 4]),
        ];
        let different: BTreeSet<u64> = tokens.iter().map(|token| token.0).collect();
        assert_eq!(different.len(), tokens.len());
        assert_eq!(tokens[0], key.token(batch, NodeId(2), [3, 4]));
    }

    #[test]
    fn no_text_for_people_has_a_key() {
        let secret = ClaimSecret([0x41; 16]);
        let key = secret.key(Epoch::NONE, NodeId(1));
        assert_eq!(format!("{secret:?} {key:?}"), "ClaimSecret ClaimKey");
    }
}
