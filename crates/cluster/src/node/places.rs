//! The places of strangers: connections whose ends have not proved themselves.
//!
//! Anyone has the open places. Addresses of listed schedulers, and of peers that have proved
//! themselves before, have places of their own. A newcomer always gets a place. If its address has
//! its share already, or all places are taken, a stranger goes: the oldest one of the address that
//! has the most. Hence no number of silent strangers shuts a peer out, and one address cannot take all places.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use downbeat_frontend::access::network;
use tokio::sync::oneshot;

/// The most strangers of unknown addresses, and of known addresses.
const MOST: [usize; 2] = [256, 256];
/// The most strangers of one address.
const MOST_OF_ADDRESS: usize = 128;
/// The most addresses that are remembered because their peers have proved themselves.
const MOST_PROVED: usize = 1024;

/// The strangers of a port, and the addresses that have places of their own.
#[derive(Default)]
pub struct Places {
    /// By number, which is the order in which they came.
    strangers: BTreeMap<u64, Stranger>,
    next: u64,
    /// Addresses of listed schedulers.
    listed: BTreeSet<IpAddr>,
    /// Addresses whose peers have proved themselves, with the number of the last proof.
    proved: BTreeMap<IpAddr, u64>,
    proofs: u64,
}

struct Stranger {
    address: IpAddr,
    is_known: bool,
    /// Dropped with the stranger's place, which ends its connection.
    _stays: oneshot::Sender<()>,
}

/// A stranger's place.
pub struct Place {
    /// The stranger's number.
    pub number: u64,
    /// Ends if the place is given to another.
    pub is_lost: oneshot::Receiver<()>,
}

impl Places {
    /// Gives a place to a newcomer from this address.
    pub fn enter(&mut self, address: IpAddr) -> Place {
        let address = network(address);
        let is_known = self.listed.contains(&address) || self.proved.contains_key(&address);
        if let Some(number) = self.goes_for(address, is_known) {
            self.strangers.remove(&number);
        }
        let (number, (stays, is_lost)) = (self.next, oneshot::channel());
        self.next += 1;
        self.strangers.insert(number, Stranger { address, is_known, _stays: stays });
        Place { number, is_lost }
    }

    /// The stranger that goes for a newcomer from this address, if one must go.
    fn goes_for(&self, address: IpAddr, is_known: bool) -> Option<u64> {
        let mut by_address = BTreeMap::<IpAddr, usize>::new();
        let alike = || self.strangers.iter().filter(|(_, stranger)| stranger.is_known == is_known);
        alike().for_each(|(_, stranger)| *by_address.entry(stranger.address).or_default() += 1);
        let from = if by_address.get(&address).is_some_and(|count| *count >= MOST_OF_ADDRESS) {
            address
        } else if alike().count() >= MOST[usize::from(is_known)] {
            // Among equals it is the address of the oldest stranger.
            let most = by_address.values().max()?;
            alike().find(|(_, stranger)| by_address.get(&stranger.address) == Some(most))?.1.address
        } else {
            return None;
        };
        alike().find(|(_, stranger)| stranger.address == from).map(|(number, _)| *number)
    }

    /// Takes a stranger's place back. The stranger has proved itself, or its connection has ended.
    pub fn leave(&mut self, number: u64) {
        self.strangers.remove(&number);
    }

    /// Remembers the address of a peer that has proved itself.
    pub fn has_proved(&mut self, address: IpAddr) {
        self.proofs += 1;
        self.proved.insert(network(address), self.proofs);
        if self.proved.len() > MOST_PROVED
            && let Some(oldest) = self.proved.iter().min_by_key(|(_, proof)| **proof).map(|(address, _)| *address)
        {
            self.proved.remove(&oldest);
        }
    }

    /// Replaces the addresses of listed schedulers.
    pub fn list(&mut self, addresses: impl Iterator<Item = IpAddr>) {
        self.listed = addresses.map(network).collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(number: u32) -> IpAddr {
        IpAddr::from(number.to_be_bytes())
    }

    fn has_place(place: &mut Place) -> bool {
        matches!(place.is_lost.try_recv(), Err(oneshot::error::TryRecvError::Empty))
    }

    #[test]
    fn an_address_that_takes_all_it_can_gives_way_to_others() {
        let mut places = Places::default();
        let mut of_one: Vec<_> = (0..10_000).map(|_| places.enter(address(1))).collect();
        assert_eq!(of_one.iter_mut().map(has_place).filter(|has| *has).count(), MOST_OF_ADDRESS);
        assert!(has_place(of_one.last_mut().unwrap()), "the newest stay");
        let others = (MOST[0] - MOST_OF_ADDRESS / 2) as u32;
        let mut others: Vec<_> = (2..2 + others).map(|number| places.enter(address(number))).collect();
        assert!(others.iter_mut().all(has_place));
        assert_eq!(places.strangers.len(), MOST[0]);
        let stay = of_one.iter_mut().map(has_place).filter(|has| *has).count();
        assert_eq!(stay, MOST_OF_ADDRESS / 2, "the address with the most gave way");
    }

    #[test]
    fn the_number_of_strangers_is_bounded_however_many_addresses_there_are() {
        let mut places = Places::default();
        let mut all: Vec<_> = (0..10_000).map(|number| places.enter(address(number))).collect();
        assert_eq!(places.strangers.len(), MOST[0]);
        assert!(all[10_000 - MOST[0]..].iter_mut().all(has_place), "the oldest went");
        all.iter().for_each(|place| places.leave(place.number));
        assert!(places.strangers.is_empty());
    }

    #[test]
    fn known_addresses_have_places_that_strangers_cannot_take() {
        let mut places = Places::default();
        places.list([address(1), "2001:db8::1".parse().unwrap()].into_iter());
        places.has_proved(address(2));
        let mut known: Vec<_> =
            [address(1), address(2), "2001:db8::2".parse().unwrap(), "::ffff:0.0.0.2".parse().unwrap()]
                .map(|address| places.enter(address))
                .into_iter()
                .collect();
        (10..10_010).for_each(|number| drop(places.enter(address(number))));
        assert!(known.iter_mut().all(has_place));
        assert!(has_place(&mut places.enter(address(2))));
        (0..10 * MOST_PROVED as u32).for_each(|number| places.has_proved(address(number)));
        assert_eq!(places.proved.len(), MOST_PROVED);
        places.list(std::iter::empty());
        assert!(!places.listed.contains(&address(1)) && !places.proved.contains_key(&address(2)));
    }
}
