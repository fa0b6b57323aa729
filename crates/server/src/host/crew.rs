//! The threads of a partition's lanes: as many as there are lanes, and each sees to whatever lane has a launch that nobody is at.
//!
//! A thread that is done with a launch goes on with what follows from it, also where that is another lane's: the next segment of a batch runs where the one before
//! ran, without a change of threads.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::Thread;

use downbeat_core::Duration;
use downbeat_engine::{CoreSet, Lane};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::hosted_model::EngineLane;
use super::launch::Work;

/// The threads of a partition's lanes.
pub struct Crew {
    /// Where they run; `None`: anywhere.
    pub cores: Option<CoreSet>,
    duty: Mutex<Duty>,
}

#[derive(Default)]
struct Duty {
    /// Lanes with launches, which a thread is to take; they are held for it.
    due: VecDeque<Arc<Seat>>,
    /// Threads that wait for one, by when they came. The last one is called first: what it needs is in the caches still.
    idle: Vec<Thread>,
    /// Threads that are more than there are lanes.
    surplus: usize,
}

/// A lane of a device: what waits for it, and whoever holds it runs that, one launch after another.
pub struct Seat {
    waiting: Mutex<Waiting>,
    arrived: Condvar,
    /// The engine's lane, of one that is for a single model.
    engine: Option<EngineLane>,
    /// Whose threads run it.
    pub crew: Arc<Crew>,
}

#[derive(Default)]
struct Waiting {
    /// In the order in which they were decided.
    launches: VecDeque<Work>,
    /// A thread has the lane, or is to take it.
    held: bool,
    /// And waits for the next launch.
    expects: bool,
    stopped: bool,
}

impl Crew {
    /// Without threads, which are to run on these cores.
    pub fn on(cores: Option<CoreSet>) -> Arc<Self> {
        Arc::new(Crew { cores, duty: Mutex::default() })
    }

    /// Has a thread take a lane, which is held for it.
    fn call(&self, seat: Arc<Seat>) {
        self.change(|duty| duty.due.push_back(seat));
    }

    /// Changes the duty, and calls a thread to see to it.
    fn change(&self, change: impl FnOnce(&mut Duty)) {
        let mut duty = self.duty.lock();
        change(&mut duty);
        let called = duty.idle.pop();
        drop(duty);
        called.iter().for_each(Thread::unpark);
    }

    /// Waits for a lane that has a launch; `None`: the thread is not needed any more.
    pub fn take(&self) -> Option<Arc<Seat>> {
        let me = std::thread::current();
        loop {
            let mut duty = self.duty.lock();
            // Woken by nobody, it may be there still.
            duty.idle.retain(|idle| idle.id() != me.id());
            if let Some(seat) = duty.due.pop_front() {
                return Some(seat);
            }
            if duty.surplus > 0 {
                duty.surplus -= 1;
                return None;
            }
            duty.idle.push(me.clone());
            drop(duty);
            std::thread::park();
        }
    }
}

impl Seat {
    /// Of a single model, whose lane `engine` is, or of whatever models; `crew` has a thread for it.
    pub fn new(crew: &Arc<Crew>, engine: Option<Box<dyn Lane>>) -> Arc<Self> {
        Arc::new(Seat {
            waiting: Mutex::default(),
            arrived: Condvar::new(),
            engine: engine.map(Mutex::new),
            crew: crew.clone(),
        })
    }

    /// The engine's lane, of one that is for a single model, once nobody else uses it.
    pub fn engine(&self) -> Option<MutexGuard<'_, Box<dyn Lane>>> {
        self.engine.as_ref().map(Mutex::lock)
    }

    /// Puts a launch behind those that wait, without a word to anybody: [`call`](Seat::call) or [`claim`](Seat::claim) follows. Under the lock of whoever decides, so that launches
    /// are in the order of the decisions.
    pub fn put(&self, work: Work) {
        self.waiting.lock().launches.push_back(work);
    }

    /// Sees to it that somebody is at what waits.
    pub fn call(self: &Arc<Self>) {
        if self.claim(|_| true) {
            self.crew.call(self.clone());
        }
    }

    /// Holds the lane for the caller, if it has launches, nobody is at them, and the first is one that the caller wants.
    pub fn claim(&self, wants: impl FnOnce(&Work) -> bool) -> bool {
        let mut waiting = self.waiting.lock();
        if waiting.held {
            if waiting.expects {
                self.arrived.notify_one();
            }
            return false;
        }
        waiting.held = waiting.launches.front().is_some_and(wants);
        waiting.held
    }

    /// The next launch, for who holds the lane; where there is none nobody holds it any more.
    pub fn next_or_release(&self) -> Option<Work> {
        let mut waiting = self.waiting.lock();
        let work = waiting.launches.pop_front();
        waiting.held = work.is_some();
        work
    }

    /// The next launch, for who holds the lane and waits for it so long at most.
    pub fn next_within(&self, time: Duration) -> Option<Work> {
        let mut waiting = self.waiting.lock();
        if waiting.launches.is_empty() && !waiting.stopped && time > Duration::ZERO {
            waiting.expects = true;
            self.arrived.wait_for(&mut waiting, time.into());
            waiting.expects = false;
        }
        waiting.launches.pop_front()
    }

    /// Who holds the lane holds it no more: what waits is for a thread of the crew.
    pub fn release(self: &Arc<Self>) {
        let mut waiting = self.waiting.lock();
        waiting.held = !waiting.launches.is_empty();
        let is_due = waiting.held;
        drop(waiting);
        if is_due {
            self.crew.call(self.clone());
        }
    }

    /// The lane gets no more launches: the crew has one thread less, once there is nothing to do.
    pub fn stop(&self) {
        let mut waiting = self.waiting.lock();
        if std::mem::replace(&mut waiting.stopped, true) {
            return;
        }
        drop(waiting);
        self.arrived.notify_one();
        self.crew.change(|duty| duty.surplus += 1);
    }
}

#[cfg(test)]
mod tests;
