//! Ports for processes that must be told where to listen before they start.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The lowest port that [`free_addresses`] gives.
const LOWEST: usize = 10_000;

/// Returns loopback addresses with a port that nothing listens on. The addresses differ from call
/// to call.
///
/// The ports are below the range from which the kernel gives out free ports. A process of another
/// test never gets such a port by chance.
pub fn free_addresses<const N: usize>() -> [SocketAddr; N] {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
    let given_by_kernel: usize = range.split_whitespace().next().unwrap().parse().unwrap();
    let count = given_by_kernel - LOWEST;
    // Two test programs at the same time begin at different ports.
    let begin = std::process::id() as usize * 1_009;
    let address = |number: usize| {
        let port = LOWEST + (begin + number) % count;
        SocketAddr::from((Ipv4Addr::LOCALHOST, u16::try_from(port).unwrap()))
    };
    let is_free = |address: &SocketAddr| TcpListener::bind(address).is_ok();
    let next = || (0..count).map(|_| address(NEXT.fetch_add(1, Relaxed))).find(is_free).expect("a free port");
    std::array::from_fn(|_| next())
}
