//! A frontend's thread runs its request's launch, if the device is free and the launch brief.
//!
//! The thread's wish for a launch goes down with the request ([`OwnLaunch`]). Only the thread's
//! guests are in a thread-local. A [`Guest`] has the thread's post at the watchdog. An engine finds
//! the order to end a run by the thread that runs it, so no other thread can use the post. A thread
//! keeps its guests for the next request.

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
