//! A model file from a stranger, loaded and run in a process of its own, as the server first tries
//! each file.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use downbeat_core::tensor::{DataType, TensorSpec};
use downbeat_engine::tensor::{elements, shape};
use downbeat_engine::{
    Buffer, Engine, ExecutorProgram, Fill, Isolated, Lane, LoadOptions, MemoryBudget, Model, Rten, RunError, State,
    Tensor, TrialLimits, hazard,
};

use crate::model_folder::in_folder;

/// The program that loads and runs the files. By default this program with the argument `executor`.
pub static PROGRAM: OnceLock<ExecutorProgram> = OnceLock::new();

/// The most memory of a process, and of all its runs together: bytes.
const MEMORY: u64 = 1 << 30;
/// The longest life of a process.
const TIME: Duration = Duration::from_secs(20);
/// The most elements of an input.
const MOST_ELEMENTS: usize = 1 << 16;
/// Rows and other sizes that vary, of the requests that follow the trial.
const SIZES: [(usize, usize); 3] = [(1, 1), (3, 5), (2, 33)];

/// A model file in a process of its own: loaded, tried, and run with numbers at the edges of their
/// types. The process may end while it loads or tries the file. The server then serves no such
/// file.
///
/// # Panics
/// If a file is refused without a word. Also if the process ends later and [`hazard`] sees no
/// danger: such a model runs in the server's own process.
pub fn model_trial(data: &[u8]) {
    in_folder(|folder| {
        if std::fs::write(&folder.model, data).is_err() {
            return;
        }
        let memory = Some(MemoryBudget::new(MEMORY));
        let options = LoadOptions { memory, ..LoadOptions::new(&folder.model, 1) };
        let model = match engine().load(&options) {
            Ok(model) => model,
            Err(error) => return assert!(!error.to_string().is_empty(), "refused without a word"),
        };
        let danger = hazard(&folder.model);
        let Ok(mut lane) = model.lane() else { return };
        for fill in Fill::ALL {
            let tried =
                run(&*model, &mut *lane, (1, 1), |spec, count, to| fill.write(&spec.name, spec.datatype, count, to));
            if has_ended(tried.as_ref()) {
                return;
            }
        }
        for sizes in SIZES {
            for first in 0..EDGES.len() {
                let ran = run(&*model, &mut *lane, sizes, |spec, count, to| {
                    (0..count).for_each(|at| edge(spec.datatype, first + at, to));
                });
                if has_ended(ran.as_ref()) {
                    assert!(!matches!(danger, Ok(None)), "a model without a hazard ended its process: {ran:?}");
                    return;
                }
            }
        }
    });
}

fn engine() -> &'static Isolated {
    static ENGINE: OnceLock<Isolated> = OnceLock::new();
    ENGINE.get_or_init(|| {
        let program = PROGRAM.get_or_init(ExecutorProgram::default).clone();
        // The sanitizer of libFuzzer reserves terabytes of addresses, and such a limit forbids
        // that.
        let memory = (!cfg!(feature = "libfuzzer")).then_some(MEMORY);
        let isolated = Isolated::new(Arc::new(Rten::new()), 1, program).expect("there is a thread");
        isolated.for_trials(TrialLimits { time: TIME, memory })
    })
}

/// Runs the whole model; `None` if the inputs would be too large. `sizes` are the rows and the
/// other sizes that vary.
fn run(
    model: &dyn Model,
    lane: &mut dyn Lane,
    sizes: (usize, usize),
    fill: impl Fn(&TensorSpec, usize, &mut Buffer),
) -> Option<Result<(), RunError>> {
    let tensor = |spec: &TensorSpec| {
        let shape = shape(spec, sizes.0, sizes.1);
        let count = elements(&shape).filter(|count| *count <= MOST_ELEMENTS)?;
        let mut data = Buffer::new();
        fill(spec, count, &mut data);
        Some(Tensor { datatype: spec.datatype, shape, data })
    };
    let tensors = model.signature().inputs.iter().map(tensor).collect::<Option<Vec<_>>>()?;
    Some(lane.run(0..model.segments(), &mut State { tensors }))
}

fn has_ended(run: Option<&Result<(), RunError>>) -> bool {
    matches!(run, Some(Err(error)) if error.of_executor)
}

/// Numbers with a fraction at the edges of their types, in the order of the integers in [`edge`].
const EDGES: [f64; 6] = [0.0, -1.0, f64::INFINITY, f64::NAN, f64::MIN, 1.0];

/// Writes the element number `at` of a row of numbers at the edges of this datatype.
fn edge(datatype: DataType, at: usize, to: &mut Buffer) {
    let fraction = EDGES[at % EDGES.len()];
    let integer = [0, -1, i64::MAX, i64::MIN, 1 << 31, 1][at % EDGES.len()];
    match datatype {
        DataType::Fp32 => to.extend_from_slice(&(fraction as f32).to_le_bytes()),
        DataType::Fp64 => to.extend_from_slice(&fraction.to_le_bytes()),
        DataType::Bytes => to.extend_from_slice(&[0; 4]),
        DataType::Bool => to.extend_from_slice(&[(at % 2) as u8]),
        // The narrower types keep the lowest bytes: the least and the largest integer stay 0 and -1
        // there, or a half.
        other => to.extend_from_slice(&integer.to_le_bytes()[..other.size().unwrap_or(8)]),
    }
}
