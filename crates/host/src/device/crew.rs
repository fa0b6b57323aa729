//! The threads of a partition's lanes, as many as lanes. A free thread takes any lane that has a
//! launch and no thread.
//!
//! A thread also runs the next segment of the batch that it has just run, though another lane has
//! that segment. The batch then changes no threads.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::Thread;

use downbeat_core::Duration;
use downbeat_engine::{CoreSet, Lane};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::launch::Work;
use super::placement::EngineLane;

/// The threads of a partition's lanes.
pub struct Crew {
    /// The cores of the threads; `None`: any.
    pub cores: Option<CoreSet>,
    duty: Mutex<Duty>,
}

#[derive(Default)]
struct Duty {
    /// Lanes with launches, each held for the thread that takes it next.
    due: VecDeque<Arc<Seat>>,
    /// Threads that wait for a lane, in the order they came. The last one is called first: its data
    /// is still in the caches.
    idle: Vec<Thread>,
    /// Threads that are more than there are lanes.
    surplus: usize,
}

/// A lane of a device: its waiting launches. The thread that holds the lane runs them one by one.
pub struct Seat {
    waiting: Mutex<Waiting>,
    arrived: Condvar,
    /// The engine's lane, if this lane serves a single model.
    engine: Option<EngineLane>,
    /// The threads that run this lane.
    pub crew: Arc<Crew>,
}

#[derive(Default)]
struct Waiting {
    /// The launches, in the order in which they were decided.
    launches: VecDeque<Work>,
    /// A thread has the lane, or the lane is due for a thread.
    held: bool,
    /// And waits for the next launch.
    expects: bool,
    stopped: bool,
}

impl Crew {
    /// Makes a crew without threads; its threads will run on `cores`.
    pub fn on(cores: Option<CoreSet>) -> Arc<Self> {
        Arc::new(Crew { cores, duty: Mutex::default() })
    }

    /// Gives a lane, which the caller holds, to a thread of the crew.
    fn call(&self, seat: Arc<Seat>) {
        self.change(|duty| duty.due.push_back(seat));
    }

    /// Changes the duty, and wakes an idle thread for it.
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
            // After a spurious wake-up the thread is still in the list.
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
    /// Makes a lane: of a single model if `engine` is given, of any model if not. The caller has
    /// started a thread of `crew` for it.
    pub fn new(crew: &Arc<Crew>, engine: Option<Box<dyn Lane>>) -> Arc<Self> {
        Arc::new(Seat {
            waiting: Mutex::default(),
            arrived: Condvar::new(),
            engine: engine.map(Mutex::new),
            crew: crew.clone(),
        })
    }

    /// The engine's lane of a single model's lane, locked once no other thread uses it.
    pub fn engine(&self) -> Option<MutexGuard<'_, Box<dyn Lane>>> {
        self.engine.as_ref().map(Mutex::lock)
    }

    /// Puts a launch behind the waiting ones and wakes no thread: [`call`](Seat::call) or
    /// [`claim`](Seat::claim) follows. The caller holds the device's lock, so that launches are in
    /// the order of the decisions.
    pub fn put(&self, work: Work) {
        self.waiting.lock().launches.push_back(work);
    }

    /// Calls a thread for the lane, if a launch waits and no thread holds the lane.
    pub fn call(self: &Arc<Self>) {
        if self.claim(|_| true) {
            self.crew.call(self.clone());
        }
    }

    /// Holds the lane for the caller, if no thread holds it and the caller wants its first launch.
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

    /// Takes the next launch for the holder of the lane. Without a launch, the lane is held no
    /// more.
    pub fn next_or_release(&self) -> Option<Work> {
        let mut waiting = self.waiting.lock();
        let work = waiting.launches.pop_front();
        waiting.held = work.is_some();
        work
    }

    /// Takes the next launch for the holder of the lane, and waits at most `time` for one to come.
    pub fn next_within(&self, time: Duration) -> Option<Work> {
        let mut waiting = self.waiting.lock();
        if waiting.launches.is_empty() && !waiting.stopped && time > Duration::ZERO {
            waiting.expects = true;
            self.arrived.wait_for(&mut waiting, time.into());
            waiting.expects = false;
        }
        waiting.launches.pop_front()
    }

    /// Releases the lane; a thread of the crew takes it if launches still wait.
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
