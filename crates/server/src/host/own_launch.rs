//! A launch that follows from a thread's act and runs on this thread, without a change of threads.
//! A frontend's thread runs its request's launch, if the device is free and the launch brief. A
//! lane's thread runs the next segment of its batch, on another lane.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use super::crew::{Crew, Seat};
use super::device_host::DeviceHost;
use super::lane::Guest;
use super::launch::Work;

thread_local! {
    /// Which launch the thread takes.
    static WANTED: RefCell<Wanted> = const { RefCell::new(Wanted::None) };
    /// The lane that the thread holds for this launch.
    static TAKEN: Cell<Option<Taken>> = const { Cell::new(None) };
    /// The thread's guests on the devices whose launches it has run.
    static GUESTS: RefCell<Vec<Arc<Guest>>> = const { RefCell::new(Vec::new()) };
}

/// Which launch a thread takes.
pub(super) enum Wanted {
    None,
    /// A brief launch.
    Brief,
    /// A brief launch that goes on with a batch.
    BriefRest,
    /// A launch of this crew's lanes that goes on with a batch, or is brief. While this thread
    /// answers the ended launch, another thread begins any other one.
    Of(Arc<Crew>),
}

/// A lane of a device, held for the thread.
struct Taken {
    host: Arc<DeviceHost>,
    seat: Arc<Seat>,
}

/// The thread takes no launch any more. A lane that it holds and will not run, as it panics, is
/// held no more.
struct Withdrawn;

impl Drop for Withdrawn {
    fn drop(&mut self) {
        WANTED.set(Wanted::None);
        if let Some(Taken { seat, .. }) = TAKEN.take() {
            seat.release();
        }
    }
}

/// Hands something over by `submit`, and runs the launch that follows, if it is brief and the
/// thread `may`.
pub fn run_own<T>(may: bool, submit: impl FnOnce() -> T) -> T {
    if !may {
        return submit();
    }
    let (submitted, taken) = taken(Wanted::Brief, submit);
    if let Some(Taken { host, seat }) = taken {
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

/// Finishes a launch by `finish`. Returns the lane of the wanted launch that follows, held for the
/// thread, unless another thread holds that lane.
pub(super) fn follow<T>(wanted: Wanted, finish: impl FnOnce() -> T) -> (T, Option<Arc<Seat>>) {
    let (finished, taken) = taken(wanted, finish);
    (finished, taken.map(|taken| taken.seat))
}

/// Does something, and returns the lane of the first wanted launch that follows.
fn taken<T>(wanted: Wanted, act: impl FnOnce() -> T) -> (T, Option<Taken>) {
    WANTED.set(wanted);
    let withdrawn = Withdrawn;
    let done = act();
    let taken = TAKEN.take();
    drop(withdrawn);
    (done, taken)
}

/// Offers a lane that has a launch: this thread holds the lane if it wants the launch, or the crew
/// is called.
pub(super) fn offer(host: &Arc<DeviceHost>, seat: &Arc<Seat>) {
    let takes = WANTED.with_borrow(|wanted| match wanted {
        Wanted::None => false,
        Wanted::Brief => seat.claim(Work::is_brief),
        Wanted::BriefRest => seat.claim(|work| work.is_brief() && work.goes_on()),
        Wanted::Of(crew) => Arc::ptr_eq(crew, &seat.crew) && seat.claim(|work| work.goes_on() || work.is_brief()),
    });
    if takes {
        WANTED.set(Wanted::None);
        TAKEN.set(Some(Taken { host: host.clone(), seat: seat.clone() }));
    } else {
        seat.call();
    }
}
