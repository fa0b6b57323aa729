//! A frontend's thread runs its request's launch, if the device is free and the launch brief.
//!
//! The watchdog watches threads, and an engine finds out on its own thread that a run must end. So
//! each thread is a [`Guest`] of the devices whose launches it runs, and keeps its guests for the
//! next request. They decide nothing: which launch the thread takes is in the [`OwnLaunch`] that
//! the thread hands down with the request.

use std::cell::RefCell;
use std::sync::Arc;

use super::lane::Guest;
use super::lane_host::{OwnLaunch, Taken, Wanted};

thread_local! {
    /// The thread's guests on the devices whose launches it has run.
    static GUESTS: RefCell<Vec<Arc<Guest>>> = const { RefCell::new(Vec::new()) };
}

/// Hands something over by `submit`, and runs the launch that follows, if it is brief and the
/// thread `may`.
pub fn run_own<T>(may: bool, submit: impl FnOnce(&mut OwnLaunch) -> T) -> T {
    let mut own = OwnLaunch::wants(if may { Wanted::Brief } else { Wanted::None });
    let submitted = submit(&mut own);
    if let Some(Taken { host, seat }) = own.take() {
        let known = GUESTS.with_borrow(|guests| guests.iter().find(|guest| guest.is_at(&host)).cloned());
        let guest = known.unwrap_or_else(|| {
            let guest = Guest::at(host);
            GUESTS.with_borrow_mut(|guests| {
                guests.retain(|guest| !guest.is_alone());
                guests.push(guest.clone());
            });
            guest
        });
        if !guest.run(&seat) {
            GUESTS.with_borrow_mut(|guests| guests.retain(|other| !Arc::ptr_eq(other, &guest)));
        }
    }
    submitted
}
