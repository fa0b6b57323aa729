//! The instances of a model: processes that its lanes share. A lane takes any free instance whose
//! process runs, so that a process that is started again holds up no request.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use downbeat_engine::isolation::{ExecutorProgram, OnMetering};
use downbeat_engine::{
    Executor, Instance, InstanceStarter, LoadError, LoadOptions, LoadedInstance, OnReady, PythonOptions, RunError,
};

use crate::side::{OnCall, ReadyChecks, side};
use crate::worker::NAME;

/// The facts from which an instance is started.
pub struct Start {
    pub starter: Arc<InstanceStarter>,
    pub program: ExecutorProgram,
    pub options: LoadOptions,
    pub on_metering: OnMetering,
    pub on_call: OnCall,
}

impl Start {
    fn instance(&self, python: &PythonOptions, number: usize) -> Result<Started, LoadError> {
        let settings = serde_json::json!({
            "model": python.model,
            "version": python.version,
            "folder": python.folder,
            "config": python.config,
            "memory": python.memory,
            "completes": python.completes,
            "instance": number,
        });
        let checks = Arc::default();
        let (instance, loaded) = self.starter.start(
            NAME,
            self.program.clone(),
            &self.options,
            settings,
            self.on_metering.clone(),
            side(&python.model, &self.on_call, &checks),
        )?;
        Ok(Started { instance, loaded, checks })
    }
}

/// An instance that has just started.
struct Started {
    instance: Instance,
    loaded: LoadedInstance,
    checks: Arc<ReadyChecks>,
}

/// The instances of a model.
pub struct Instances {
    start: Start,
    python: PythonOptions,
    shelf: Mutex<Shelf>,
    changed: Condvar,
}

#[derive(Default)]
struct Shelf {
    /// The instances that no lane uses.
    free: Vec<Instance>,
    /// The processes of all instances.
    processes: Vec<Arc<dyn Executor>>,
    /// The checks of readiness of all instances.
    checks: Vec<Arc<ReadyChecks>>,
    /// The number of lanes.
    lanes: usize,
}

impl Instances {
    /// Starts the first instance.
    ///
    /// # Errors
    /// If it cannot load the model.
    pub fn begin(start: Start, python: &PythonOptions) -> Result<(Arc<Instances>, LoadedInstance), LoadError> {
        let Started { instance, loaded, checks } = start.instance(python, 0)?;
        // The other instances get the completed configuration.
        let config = loaded.configuration.clone().unwrap_or_else(|| python.config.clone());
        let python = PythonOptions { config, completes: false, ..python.clone() };
        let processes = vec![instance.executor()];
        let shelf = Shelf { processes, free: vec![instance], checks: vec![checks], lanes: 0 };
        Ok((Arc::new(Instances { start, python, shelf: Mutex::new(shelf), changed: Condvar::new() }), loaded))
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes another lane, and starts an instance for it if the lanes are more than the instances.
    ///
    /// # Errors
    /// If it cannot load the model.
    pub fn add_lane(&self) -> Result<(), LoadError> {
        let number = {
            let mut shelf = self.shelf();
            shelf.lanes += 1;
            shelf.processes.len()
        };
        if number >= self.shelf().lanes {
            return Ok(());
        }
        let started = self.start.instance(&self.python, number);
        let mut shelf = self.shelf();
        match started {
            Ok(Started { instance, checks, .. }) => {
                shelf.processes.push(instance.executor());
                shelf.checks.push(checks);
                shelf.free.push(instance);
                Ok(())
            }
            Err(error) => {
                shelf.lanes -= 1;
                Err(error)
            }
        }
    }

    /// A lane has gone.
    pub fn remove_lane(&self) {
        self.shelf().lanes -= 1;
    }

    /// Takes an instance whose process runs. Waits while other lanes use all of these.
    ///
    /// # Errors
    /// If no process runs.
    pub fn take(&self) -> Result<Instance, RunError> {
        let mut shelf = self.shelf();
        loop {
            let up = shelf.free.iter().rposition(|instance| instance.executor().down().is_none());
            if let Some(up) = up {
                return Ok(shelf.free.swap_remove(up));
            }
            if let Some(reason) = down(&shelf.processes) {
                return Err(RunError { of_executor: true, ..RunError::new(NAME, reason) });
            }
            shelf = self.changed.wait(shelf).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Asks the code of each instance whether it is ready: the model is, if all are.
    pub fn ask_ready(&self, on_ready: OnReady) {
        let checks = self.shelf().checks.clone();
        let open = Arc::new(Mutex::new((checks.len(), Some(on_ready))));
        for check in checks {
            let open = open.clone();
            check.ask(Box::new(move |answer| {
                let mut open = open.lock().unwrap_or_else(PoisonError::into_inner);
                open.0 -= 1;
                let is_decided = answer.is_err() || open.0 == 0;
                let on_ready = open.1.take_if(|_| is_decided);
                drop(open);
                if let Some(on_ready) = on_ready {
                    on_ready(answer);
                }
            }));
        }
    }

    /// Gives an instance back.
    pub fn put(&self, instance: Instance) {
        self.shelf().free.push(instance);
        self.changed.notify_one();
    }
}

/// The reason why no process runs; `None`: one does.
fn down(processes: &[Arc<dyn Executor>]) -> Option<String> {
    let mut reason = None;
    for process in processes {
        reason = Some(process.down()?);
    }
    reason
}

/// All processes of a model as one.
impl Executor for Instances {
    fn pid(&self) -> Option<u32> {
        self.shelf().processes.iter().find_map(|process| process.pid())
    }

    fn signal(&self) -> Option<i32> {
        self.shelf().processes.iter().find_map(|process| process.signal())
    }

    fn comes_back(&self) -> bool {
        let processes = self.shelf().processes.clone();
        processes.iter().any(|process| process.comes_back())
    }

    fn restarts(&self) -> u64 {
        self.shelf().processes.iter().map(|process| process.restarts()).sum()
    }

    fn down(&self) -> Option<String> {
        down(&self.shelf().processes)
    }
}
