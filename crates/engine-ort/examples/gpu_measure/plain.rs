//! onnxruntime as it comes: a plain session with the provider's default options, tensors on the
//! host.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::time::Instant;

use downbeat_core::tensor::{DataType, Signature};
use downbeat_engine::inspect;
use downbeat_engine_ort::preflight::preflight;
use downbeat_engine_ort::{CudaOptions, Search};
use ort::environment::Environment;
use ort::session::Session;
use ort::session::SessionInputValue;
use ort::value::{DynValue, Tensor};

use crate::Outcome;
use crate::arguments::Arguments;
use crate::subject::{item_shape, random};

/// Answers the requests of standard input on standard output, see `beside.rs`.
pub fn serve(arguments: &Arguments) -> Outcome<()> {
    let environment = match start() {
        Ok(environment) => environment,
        Err(error) => return answer(&serde_json::json!({"error": error.to_string()})),
    };
    let mut sessions: BTreeMap<String, (Session, Signature)> = BTreeMap::new();
    answer(&serde_json::json!({"name": "onnxruntime, plain session"}))?;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let [model, batch, runs] = *line.split_whitespace().collect::<Vec<_>>() else { continue };
        let mut millis = || -> Outcome<Vec<f64>> {
            if !sessions.contains_key(model) {
                let path = arguments.path(model);
                let builder = Session::builder(&environment).map_err(|e| e.message().to_owned())?;
                let providers = [ort::ep::CUDA::default().build().error_on_failure()];
                let mut builder = builder.with_execution_providers(providers).map_err(|e| e.message().to_owned())?;
                let session = builder.commit_from_file(&path).map_err(|e| e.message().to_owned())?;
                sessions.insert(model.to_owned(), (session, inspect(&path)?));
            }
            let (session, signature) = sessions.get_mut(model).ok_or("just made")?;
            run(session, signature, batch.parse()?, runs.parse()?)
        };
        match millis() {
            Ok(ms) => answer(&serde_json::json!({"ms": ms}))?,
            Err(error) => answer(&serde_json::json!({"error": error.to_string()}))?,
        }
    }
    Ok(())
}

/// Loads the library through `ort` itself.
fn start() -> Outcome<Environment> {
    let options = CudaOptions { devices: vec![0], ..CudaOptions::default() };
    let ready = preflight(&Search::from_env(), &options)?;
    let environment = ort::init_from(&ready.library)?.with_name("plain").with_telemetry(false).build();
    Ok(environment.map_err(|e| e.message().to_owned())?)
}

fn answer(answer: &serde_json::Value) -> Outcome<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{answer}")?;
    Ok(out.flush()?)
}

fn run(session: &mut Session, signature: &Signature, batch: usize, runs: usize) -> Outcome<Vec<f64>> {
    let mut inputs: Vec<(String, DynValue)> = Vec::new();
    for spec in &signature.inputs {
        let item = item_shape(spec);
        let bytes = random(spec, batch * item.iter().product::<usize>())?;
        let shape: Vec<usize> = std::iter::once(batch).chain(item).collect();
        let value = match spec.datatype {
            DataType::Fp32 => {
                let (elements, _) = bytes.as_chunks::<4>();
                Tensor::from_array((shape, elements.iter().map(|e| f32::from_le_bytes(*e)).collect::<Vec<_>>()))?
                    .into_dyn()
            }
            _ => {
                let (elements, _) = bytes.as_chunks::<8>();
                Tensor::from_array((shape, elements.iter().map(|e| i64::from_le_bytes(*e)).collect::<Vec<_>>()))?
                    .into_dyn()
            }
        };
        inputs.push((spec.name.clone(), value));
    }
    (0..runs)
        .map(|_| {
            let views: Vec<(String, SessionInputValue<'_>)> =
                inputs.iter().map(|(name, value)| (name.clone(), SessionInputValue::View(value.view()))).collect();
            let begin = Instant::now();
            let outputs = session.run(views)?;
            let millis = begin.elapsed().as_secs_f64() * 1e3;
            drop(outputs);
            Ok(millis)
        })
        .collect()
}
