//! The sender of a request.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// The sender of a request: an address, and a connection from that address. All loopback addresses
/// count as the same address. The default is a caller in this process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Client {
    address: Option<IpAddr>,
    connection: u64,
}

impl Client {
    /// A caller in this process.
    pub const HERE: Client = Client { address: None, connection: 0 };

    /// A new connection from this address.
    pub fn at(address: IpAddr) -> Self {
        static CONNECTIONS: AtomicU64 = AtomicU64::new(1);
        let address = address.to_canonical();
        let address = if address.is_loopback() { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { address };
        Client { address: Some(address), connection: CONNECTIONS.fetch_add(1, Relaxed) }
    }

    /// The address, which all connections of a client share; `None`: this process.
    pub fn address(self) -> Option<IpAddr> {
        self.address
    }

    /// The number of the connection.
    pub fn connection(self) -> u64 {
        self.connection
    }
}
