//! One call of an entry point. It locks the machine, checks the requirements of the call, and waits
//! where the call must wait.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::MutexGuard;

use crate::context::{Device, DeviceConfig};
use crate::machine::{CHANGED, MACHINE, Machine};
use crate::result::{CUresult, Outcome};
use crate::worker;

/// The requirements of an entry point.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Needs {
    Nothing,
    /// `cuInit` was called.
    Init,
    /// A context is current, and its device has not failed.
    Context,
    /// A context is current. The call also works on a failed device, and then reports the failure.
    Release,
}

/// The machine, locked by this thread.
pub struct Session {
    guard: Option<MutexGuard<'static, Machine>>,
    /// The current context and its device, where the call needs one.
    pub context: u64,
    pub device: i32,
}

thread_local! {
    static IN_KERNEL: Cell<bool> = const { Cell::new(false) };
    static SPENT: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Sets how long the kernel that this thread plays takes, nanoseconds of virtual time.
pub fn spend(nanoseconds: u64) {
    SPENT.set(Some(nanoseconds));
}

/// Locks the machine.
pub fn lock() -> Session {
    let mut guard = MACHINE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let first = !std::mem::replace(&mut guard.configured, true);
    let mut session = Session { guard: Some(guard), context: 0, device: 0 };
    if first {
        session.devices = DeviceConfig::from_environment().into_iter().map(Device::new).collect();
        session.readable = std::env::var_os("CUDA_STAND_IN_READABLE").is_some();
        if let Some(time) = std::env::var("CUDA_STAND_IN_LAUNCH_TIME").ok().and_then(|time| time.parse().ok()) {
            session.launch_time = time;
        }
        if let Some(seed) = std::env::var("CUDA_STAND_IN_SEED").ok().and_then(|seed| seed.parse().ok()) {
            worker::start(&mut session, seed);
        }
    }
    session
}

/// Runs an entry point of the driver.
pub fn enter(name: &'static str, needs: Needs, body: impl FnOnce(&mut Session) -> Outcome) -> CUresult {
    let mut session = lock();
    *session.calls.entry(name).or_default() += 1;
    let outcome = if IN_KERNEL.get() {
        session.wrong(CUresult::CUDA_ERROR_NOT_PERMITTED, format!("{name} was called by a function that a stream runs"))
    } else {
        call(&mut session, name, needs, body)
    };
    match outcome {
        Ok(()) => CUresult::CUDA_SUCCESS,
        Err(code) => code,
    }
}

fn call(session: &mut Session, name: &str, needs: Needs, body: impl FnOnce(&mut Session) -> Outcome) -> Outcome {
    if let Err(code) = session.faults.call(name) {
        session.invalidate_own();
        return Err(code);
    }
    if needs != Needs::Nothing && !session.initialised {
        return session.wrong(CUresult::CUDA_ERROR_NOT_INITIALIZED, format!("{name} was called before cuInit"));
    }
    if needs != Needs::Nothing {
        session.refuse_unsafe(name)?;
    }
    let mut failure = Ok(());
    if matches!(needs, Needs::Context | Needs::Release) {
        match session.current() {
            Ok((context, device)) => (session.context, session.device) = (context, device),
            Err(code @ (CUresult::CUDA_ERROR_INVALID_CONTEXT | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)) => {
                return Err(code);
            }
            Err(code) if needs == Needs::Release => failure = Err(code),
            Err(code) => return Err(code),
        }
    }
    body(session)?;
    failure
}

impl Session {
    /// Lets other threads go on until work has run or was enqueued.
    pub fn wait(&mut self) {
        if let Some(guard) = self.guard.take() {
            self.guard = Some(CHANGED.wait(guard).unwrap_or_else(|poisoned| poisoned.into_inner()));
        }
    }

    /// Runs a function that plays a kernel, without the lock. Returns its duration in nanoseconds
    /// of virtual time.
    pub fn play(&mut self, function: impl FnOnce()) -> u64 {
        self.guard = None;
        SPENT.set(None);
        IN_KERNEL.set(true);
        function();
        IN_KERNEL.set(false);
        self.guard = Some(MACHINE.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        SPENT.take().unwrap_or(10_000)
    }
}

impl Deref for Session {
    type Target = Machine;

    fn deref(&self) -> &Machine {
        self.guard.as_ref().unwrap_or_else(|| unreachable!("the lock is given up only inside of `wait` and `play`"))
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut Machine {
        self.guard.as_mut().unwrap_or_else(|| unreachable!("the lock is given up only inside of `wait` and `play`"))
    }
}
