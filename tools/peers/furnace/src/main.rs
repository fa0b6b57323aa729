//! Serves ONNX models by furnace-server: `furnace-onnx 3000 3001 mlp=mlp.onnx encoder=encoder.onnx`.
//!
//! The first two arguments are the ports of HTTP and gRPC on the loopback address. furnace-server has no engine for
//! ONNX files, so this program hands its requests to ONNX Runtime (`ORT_DYLIB_PATH`). All settings of
//! furnace-server are its defaults.

use std::env;
use std::error::Error;
use std::sync::{Condvar, Mutex, PoisonError};

use furnace::{DataType, FurnaceError, HostTensor, IoSpec, Model, ModelError, Server, TensorModel, Values};
use ort::environment::Environment;
use ort::session::{Session, SessionInputValue};
use ort::value::{Outlet, Shape, Tensor, TensorElementType, ValueType};

/// Sessions of a model: as many runs of it go on at a time.
const SESSIONS: usize = 2;

/// An ONNX model with the batch as the first dimension of each tensor.
#[derive(Debug)]
struct OnnxModel {
    name: String,
    idle: Mutex<Vec<Session>>,
    returned: Condvar,
    inputs: Vec<IoSpec>,
    outputs: Vec<IoSpec>,
}

impl OnnxModel {
    /// Loads `path`; each session computes on one thread, the caller's.
    fn load(environment: &Environment, name: &str, path: &str) -> Result<OnnxModel, Box<dyn Error>> {
        let session = || -> Result<Session, Box<dyn Error>> {
            let builder = Session::builder(environment)?;
            Ok(builder.with_intra_threads(1)?.commit_from_file(path)?)
        };
        let sessions = (0..SESSIONS).map(|_| session()).collect::<Result<Vec<_>, _>>()?;
        let inputs = sessions[0].inputs().iter().map(spec).collect::<Result<_, _>>()?;
        let outputs = sessions[0].outputs().iter().map(spec).collect::<Result<_, _>>()?;
        Ok(OnnxModel { name: name.into(), idle: Mutex::new(sessions), returned: Condvar::new(), inputs, outputs })
    }

    /// Waits for a session that no run uses, and lends it to `run`.
    fn with_session<T>(&self, run: impl FnOnce(&mut Session) -> T) -> T {
        let mut session = loop {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(session) = idle.pop() {
                break session;
            }
            drop(self.returned.wait(idle));
        };
        let result = run(&mut session);
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(session);
        self.returned.notify_one();
        result
    }

    fn infer(&self, inputs: Vec<HostTensor>) -> ort::Result<Vec<HostTensor>> {
        let mut named = Vec::with_capacity(inputs.len());
        for (spec, input) in self.inputs.iter().zip(inputs) {
            let value: SessionInputValue<'_> = match input.values {
                Values::F32(values) => Tensor::from_array((input.shape, values))?.into(),
                Values::I64(values) => Tensor::from_array((input.shape, values))?.into(),
            };
            named.push((spec.name.as_str(), value));
        }
        self.with_session(|session| {
            let answers = session.run(named)?;
            self.outputs.iter().map(|spec| output(spec, &answers[spec.name.as_str()])).collect()
        })
    }
}

impl TensorModel for OnnxModel {
    fn name(&self) -> &str {
        &self.name
    }

    fn backend(&self) -> &str {
        "cpu"
    }

    fn inputs(&self) -> Vec<IoSpec> {
        self.inputs.clone()
    }

    fn outputs(&self) -> Vec<IoSpec> {
        self.outputs.clone()
    }

    fn run(&self, inputs: Vec<HostTensor>) -> furnace::Result<Vec<HostTensor>> {
        self.infer(inputs).map_err(|e| FurnaceError::Model(ModelError::InferenceFailed(e.to_string())))
    }
}

fn output(spec: &IoSpec, value: &ort::value::DynValue) -> ort::Result<HostTensor> {
    let sizes = |shape: &Shape| shape.iter().map(|&size| size as usize).collect();
    if spec.dtype == DataType::Int64 {
        let (shape, values) = value.try_extract_tensor::<i64>()?;
        return Ok(HostTensor { shape: sizes(shape), values: Values::I64(values.to_vec()) });
    }
    let (shape, values) = value.try_extract_tensor::<f32>()?;
    Ok(HostTensor { shape: sizes(shape), values: Values::F32(values.to_vec()) })
}

/// Describes a tensor without its batch dimension.
fn spec(outlet: &Outlet) -> Result<IoSpec, Box<dyn Error>> {
    let ValueType::Tensor { ty, shape, .. } = outlet.dtype() else {
        return Err(format!("{}: not a tensor", outlet.name()).into());
    };
    let kind = match ty {
        TensorElementType::Float32 => DataType::Fp32,
        TensorElementType::Int64 => DataType::Int64,
        other => return Err(format!("{}: elements of type {other}", outlet.name()).into()),
    };
    let sizes: Vec<Option<usize>> = shape.iter().skip(1).map(|&size| usize::try_from(size).ok()).collect();
    Ok(IoSpec::new(outlet.name(), kind, &sizes))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let mut port = || -> Result<u16, Box<dyn Error>> { Ok(arguments.next().ok_or("a port is missing")?.parse()?) };
    let (http, grpc) = (port()?, port()?);
    let environment = ort::init_from(env::var("ORT_DYLIB_PATH")?)?.with_telemetry(false).build()?;
    let mut server = Server::new().port(http).configure(|config| config.grpc_port = Some(grpc));
    for argument in arguments {
        let (name, path) = argument.split_once('=').ok_or("models are given as NAME=FILE")?;
        server = server.model(Model::custom(OnnxModel::load(&environment, name, path)?));
    }
    Ok(server.serve().await?)
}
