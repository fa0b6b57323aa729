//! A launch that the thread which brought its request runs itself: where the device is free and the launch brief, a request is answered without a change of threads.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use super::device_host::DeviceHost;
use super::lane::{Guest, Seat, Work};

thread_local! {
    static OFFER: Cell<Offer> = const { Cell::new(Offer::None) };
    /// For the devices that the thread has run launches of.
    static GUESTS: RefCell<Vec<Arc<Guest>>> = const { RefCell::new(Vec::new()) };
}

/// Whether the thread takes a launch.
#[derive(Default)]
enum Offer {
    /// It does not.
    #[default]
    None,
    /// It takes one.
    Open,
    /// It has one of a lane of a device.
    Taken(Arc<DeviceHost>, Arc<Seat>, Work),
}

/// The thread takes no launch any more. One that it has and will not run, as it panics, is the lane's again.
struct Withdrawn;

impl Drop for Withdrawn {
    fn drop(&mut self) {
        if let Offer::Taken(_, seat, work) = OFFER.take() {
            seat.put(work);
        }
    }
}

/// Hands something over by `submit`, and runs the launch that comes of it, if it is brief and the thread `may`.
pub fn run_own<T>(may: bool, submit: impl FnOnce() -> T) -> T {
    if !may {
        return submit();
    }
    OFFER.set(Offer::Open);
    let withdrawn = Withdrawn;
    let submitted = submit();
    if let Offer::Taken(host, seat, work) = OFFER.take() {
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
    match OFFER.take() {
        Offer::Open if work.is_brief() => {
            OFFER.set(Offer::Taken(host.clone(), seat.clone(), work));
            None
        }
        offer => {
            OFFER.set(offer);
            Some(work)
        }
    }
}
