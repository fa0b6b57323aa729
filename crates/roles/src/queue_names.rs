//! The short names of queues on a link.

use std::collections::BTreeMap;

use crate::message::{QueueAlias, QueueKey};

/// The most queues whose names are kept without a request.
const REMEMBERED: usize = 1024;
/// The most names that a peer may give.
const MOST_NAMES: usize = 65_536;

#[derive(Clone, Debug)]
struct Named {
    key: QueueKey,
    /// How many requests use the name.
    users: usize,
    /// Whether the name is in `idle`.
    is_idle: bool,
    /// The number of the link on which the peer last heard the name; 0: none.
    told: u64,
}

/// The names that a node gives to queues in use, and to some more. A name without users is given to
/// another queue in time.
#[derive(Clone, Debug)]
pub(super) struct GivenNames {
    by_key: BTreeMap<QueueKey, u32>,
    names: Vec<Named>,
    /// Names that may have no users.
    idle: Vec<u32>,
    /// The number of links so far.
    link: u64,
}

impl GivenNames {
    /// No names.
    pub fn new() -> Self {
        GivenNames { by_key: BTreeMap::new(), names: Vec::new(), idle: Vec::new(), link: 1 }
    }

    /// Notes a new link, on which the peer has heard no names.
    pub fn handle_new_link(&mut self) {
        self.link += 1;
    }

    /// The name of a queue, which gains a user.
    pub fn take(&mut self, key: QueueKey) -> QueueAlias {
        if let Some(alias) = self.by_key.get(&key).copied()
            && let Some(named) = self.names.get_mut(alias as usize)
        {
            named.users += 1;
            return QueueAlias(alias);
        }
        let new = Named { key: key.clone(), users: 1, is_idle: false, told: 0 };
        let alias = self.unused().unwrap_or(self.names.len() as u32);
        match self.names.get_mut(alias as usize) {
            Some(named) => drop(std::mem::replace(named, new)),
            None => self.names.push(new),
        }
        self.by_key.insert(key, alias);
        QueueAlias(alias)
    }

    /// A name without users for reuse, if there are many names.
    fn unused(&mut self) -> Option<u32> {
        if self.names.len() < REMEMBERED {
            return None;
        }
        while let Some(alias) = self.idle.pop() {
            let Some(named) = self.names.get_mut(alias as usize) else { continue };
            named.is_idle = false;
            if named.users == 0 {
                self.by_key.remove(&named.key);
                return Some(alias);
            }
        }
        None
    }

    /// Removes a user of a name.
    pub fn give_back(&mut self, alias: QueueAlias) {
        let Some(named) = self.names.get_mut(alias.0 as usize) else { return };
        named.users = named.users.saturating_sub(1);
        if named.users == 0 && !named.is_idle {
            named.is_idle = true;
            self.idle.push(alias.0);
        }
    }

    /// The queue that a name stands for.
    pub fn key(&self, alias: QueueAlias) -> Option<&QueueKey> {
        Some(&self.names.get(alias.0 as usize)?.key)
    }

    /// The queue that a name stands for, if the peer has not heard the name on this link. Marks the
    /// name as heard.
    pub fn tell(&mut self, alias: QueueAlias) -> Option<QueueKey> {
        let named = self.names.get_mut(alias.0 as usize).filter(|named| named.told != self.link)?;
        named.told = self.link;
        Some(named.key.clone())
    }
}

/// The names that a peer has given on its link.
#[derive(Clone, Debug, Default)]
pub(super) struct HeardNames(BTreeMap<QueueAlias, QueueKey>);

impl HeardNames {
    /// Records that a name stands for a queue from now on. Returns false if there are too many
    /// names.
    pub fn insert(&mut self, alias: QueueAlias, key: QueueKey) -> bool {
        if self.0.len() >= MOST_NAMES && !self.0.contains_key(&alias) {
            return false;
        }
        self.0.insert(alias, key);
        true
    }

    /// The queue that a name stands for.
    pub fn get(&self, alias: QueueAlias) -> Option<&QueueKey> {
        self.0.get(&alias)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: i64) -> QueueKey {
        QueueKey { model: "m".into(), version: 1, shape: vec![n] }
    }

    #[test]
    fn names_are_as_many_as_are_used_or_remembered() {
        let mut names = GivenNames::new();
        for n in 0..100_000 {
            let alias = names.take(key(n));
            assert_eq!(names.key(alias), Some(&key(n)));
            assert_eq!(names.tell(alias), Some(key(n)), "a name that was another's is told anew");
            names.give_back(alias);
        }
        assert_eq!((names.names.len(), names.by_key.len()), (REMEMBERED, REMEMBERED));
        let held: Vec<QueueAlias> = (0..5_000).map(|n| names.take(key(n))).collect();
        assert!(
            held.iter().zip(0..).all(|(alias, n)| names.key(*alias) == Some(&key(n))),
            "what is used keeps its name"
        );
    }

    #[test]
    fn a_name_is_told_once_on_each_link() {
        let mut names = GivenNames::new();
        let alias = names.take(key(1));
        assert_eq!((names.tell(alias), names.tell(alias)), (Some(key(1)), None));
        names.handle_new_link();
        assert_eq!((names.tell(alias), names.tell(alias)), (Some(key(1)), None));
        assert_eq!(names.tell(QueueAlias(9)), None);
    }

    #[test]
    fn a_peer_can_give_so_many_names_and_no_more() {
        let mut names = HeardNames::default();
        assert!((0..MOST_NAMES as u32).all(|n| names.insert(QueueAlias(n), key(1))));
        assert!(!names.insert(QueueAlias(u32::MAX), key(1)));
        assert!(names.insert(QueueAlias(7), key(2)));
        assert_eq!(names.get(QueueAlias(7)), Some(&key(2)));
        assert_eq!(names.get(QueueAlias(u32::MAX)), None);
    }
}
