//! Limits of single addresses.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};

use downbeat_core::Time;
use parking_lot::Mutex;

use super::Denied;
use super::rate::Rate;

/// Most addresses that are remembered. An address that is forgotten may send as many requests as a
/// new one.
const MOST: usize = 1 << 16;

/// The limits of all addresses.
pub(super) struct Addresses {
    a_second: f64,
    seen: Mutex<HashMap<IpAddr, Rate>>,
}

impl Addresses {
    /// A limit of requests a second for each address.
    pub fn new(a_second: f64) -> Self {
        Addresses { a_second, seen: Mutex::default() }
    }

    /// Takes a request of an address.
    pub fn take(&self, address: IpAddr, now: Time) -> Result<(), Denied> {
        let mut seen = self.seen.lock();
        let address = network(address);
        if seen.len() >= MOST && !seen.contains_key(&address) {
            seen.retain(|_, rate| !rate.is_as_new(now));
            if seen.len() >= MOST {
                seen.clear();
            }
        }
        let rate = seen.entry(address).or_insert_with(|| Rate::new(self.a_second));
        rate.take(now).map_err(|retry_after| Denied::TooMany {
            sender: "an address".to_owned(),
            a_second: self.a_second,
            option: "--requests-per-address",
            retry_after,
        })
    }
}

/// The part of an address that one client cannot change: hosts choose the lower half of IPv6
/// addresses themselves.
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_network_has_its_own_limit() {
        let addresses = Addresses::new(1.0);
        let at = |s: u64| Time::from_nanos(s * 1_000_000_000);
        let take = |address: &str, s| addresses.take(address.parse().unwrap(), at(s)).is_ok();
        assert!(take("10.0.0.1", 0) && take("10.0.0.2", 0) && !take("10.0.0.1", 0) && !take("::ffff:10.0.0.1", 0));
        assert!(take("2001:db8::1", 0) && !take("2001:db8::2", 0) && take("2001:db8:0:1::1", 0));
        assert!(take("10.0.0.1", 1));
    }

    #[test]
    fn the_number_of_addresses_is_bounded() {
        let addresses = Addresses::new(1.0);
        for number in 0..MOST as u32 + 10 {
            addresses.take(IpAddr::from(number.to_be_bytes()), Time::ZERO).unwrap();
        }
        assert!(addresses.seen.lock().len() <= MOST);
    }
}
