//! A launch that the thread which brought its request runs itself: where the device is free and the launch brief, a request is answered without a change of threads.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use super::device_host::DeviceHost;
use super::lane::{Guest, Seat, Work};

thread_local! {
    /// Whether the thread takes a launch.
    static OPEN: Cell<bool> = const { Cell::new(false) };
    /// The one that it has taken.
    static TAKEN: Cell<Option<Taken>> = const { Cell::new(None) };
    /// For the devices that the thread has run launches of.
    static GUESTS: RefCell<Vec<Arc<Guest>>> = const { RefCell::new(Vec::new()) };
}

/// A launch of a lane of a device.
struct Taken {
    host: Arc<DeviceHost>,
    seat: Arc<Seat>,
    work: Work,
}

/// The thread takes no launch any more. One that it has and will not run, as it panics, is the lane's again.
struct Withdrawn;

impl Drop for Withdrawn {
    fn drop(&mut self) {
        OPEN.set(false);
        if let Some(Taken { seat, work, .. }) = TAKEN.take() {
            seat.put(work);
        }
    }
}

/// Hands something over by `submit`, and runs the launch that comes of it, if it is brief and the thread `may`.
pub fn run_own<T>(may: bool, submit: impl FnOnce() -> T) -> T {
    if !may {
        return submit();
    }
    OPEN.set(true);
    let withdrawn = Withdrawn;
    let submitted = submit();
    OPEN.set(false);
    if let Some(Taken { host, seat, work }) = TAKEN.take() {
        let known = GUESTS.with_borrow(|guests| guests.iter().find(|guest| guest.is_at(&host)).cloned());
        let guest = known.unwrap_or_else(|| {
            let guest = Guest::at(host);
            GUESTS.with_borrow_mut(|guests| {
                guests.retain(|guest| !guest.is_alone());
                guests.push(guest.clone());
            });
            guest
        });
        if !guest.run(&seat, work) {
            GUESTS.with_borrow_mut(|guests| guests.retain(|other| !Arc::ptr_eq(other, &guest)));
        }
    }
    drop(withdrawn);
    submitted
}

/// Leaves a launch to the thread, or gives it back if the thread takes none.
pub(super) fn leave(host: &Arc<DeviceHost>, seat: &Arc<Seat>, work: Work) -> Option<Work> {
    if !OPEN.get() || !work.is_brief() {
        return Some(work);
    }
    OPEN.set(false);
    TAKEN.set(Some(Taken { host: host.clone(), seat: seat.clone(), work }));
    None
}
