//! Checks whether requests can enter a batch.

use bytes::Bytes;
use downbeat_protocol::{InferRequest, InferTensor};
use downbeat_repository::TensorBinding;
use downbeat_service::error::ServiceError;
use smallvec::SmallVec;

use super::{Admitted, BatchCodec};

impl BatchCodec {
    /// Checks names, datatypes, shapes and batch dimension of a request's inputs without their
    /// data, which may still be elsewhere.
    ///
    /// # Errors
    /// The errors of [`BatchCodec::admit`].
    pub fn check_inputs(&self, request: &InferRequest) -> Result<(), ServiceError> {
        let model = &request.model_name;
        for input in &request.inputs {
            let Some(binding) = self.inputs.iter().find(|binding| binding.client.name == input.name) else {
                return Err(self.wrong_inputs(model, &request.inputs));
            };
            let rows = self.check_shape(model, binding, input)?;
            if rows > i64::from(self.max_batch) {
                return Err(self.too_many(model, rows.unsigned_abs()));
            }
        }
        Ok(())
    }

    /// Checks a request, and leaves its inputs in place. The elements of `BYTES` inputs are not
    /// counted. Returns the size of the batch dimension (1 if the model has none).
    ///
    /// # Errors
    /// The errors of [`BatchCodec::admit`].
    pub fn check(&self, request: &InferRequest) -> Result<u32, ServiceError> {
        let model = &request.model_name;
        let is_there = |name: &str| request.inputs.iter().any(|input| input.name == name);
        let mut required = self.inputs.iter().filter(|binding| !binding.optional);
        let is_double = |at: usize| request.inputs[..at].iter().any(|input| input.name == request.inputs[at].name);
        if !required.all(|binding| is_there(&binding.client.name)) || (0..request.inputs.len()).any(is_double) {
            return Err(self.wrong_inputs(model, &request.inputs));
        }
        let mut rows = None;
        for input in &request.inputs {
            let Some(binding) = self.inputs.iter().find(|binding| binding.client.name == input.name) else {
                return Err(self.wrong_inputs(model, &request.inputs));
            };
            let its_rows = match binding.datatype().size() {
                Some(_) => self.check_input(model, binding, input)?,
                None => u32::try_from(self.check_shape(model, binding, input)?).unwrap_or(u32::MAX),
            };
            if *rows.get_or_insert(its_rows) != its_rows {
                return Err(different_rows(model, &input.name, its_rows, rows.unwrap_or(its_rows)));
            }
        }
        let rows = rows.unwrap_or(1);
        if rows > self.max_batch { Err(self.too_many(model, u64::from(rows))) } else { Ok(rows) }
    }

    /// Checks a request and takes its input bytes.
    ///
    /// # Errors
    /// `InvalidArgument`, with the tensor, the expected value and the actual one.
    pub fn admit(&self, request: &mut InferRequest) -> Result<Admitted, ServiceError> {
        let model = &request.model_name;
        let least = self.required().count();
        if !(least..=self.inputs.len()).contains(&request.inputs.len()) {
            return Err(self.wrong_inputs(model, &request.inputs));
        }
        let sent = request.inputs.len();
        let mut found_inputs = 0;
        let mut inputs: SmallVec<[Bytes; 2]> = SmallVec::new();
        let mut shapes = SmallVec::new();
        let mut rows = None;
        let mut left_out = Vec::new();
        for (position, binding) in self.inputs.iter().enumerate() {
            // Clients nearly always send the inputs in the model's order.
            let found = match request.inputs.get(position) {
                Some(input) if input.name == binding.client.name => position,
                _ => {
                    match (
                        request.inputs.iter().position(|i| i.name == binding.client.name),
                        self.defaults.get(position),
                    ) {
                        (Some(found), _) => found,
                        (None, Some(Some(default))) => {
                            shapes.extend_from_slice(&default.shape);
                            inputs.push(default.item.clone());
                            continue;
                        }
                        (None, _) if self.may_be_missing(binding) => {
                            // Requests without the input are apart from requests with it.
                            let sizes = self.item_dims(&binding.client.dims).iter().map(|size| (*size).max(0));
                            shapes.extend(sizes);
                            inputs.push(Bytes::new());
                            left_out.push(position);
                            continue;
                        }
                        (None, _) => return Err(self.wrong_inputs(model, &request.inputs)),
                    }
                }
            };
            found_inputs += 1;
            let input = &mut request.inputs[found];
            let its_rows = self.check_input(model, binding, input)?;
            if *rows.get_or_insert(its_rows) != its_rows {
                return Err(different_rows(model, &input.name, its_rows, rows.unwrap_or(its_rows)));
            }
            match self.is_single(binding) {
                true => shapes.extend_from_slice(self.item_dims(&binding.client.dims)),
                false => shapes.extend_from_slice(self.item_dims(&input.shape)),
            }
            inputs.push(std::mem::take(&mut input.data));
        }
        let rows = rows.unwrap_or(1);
        if rows > self.max_batch {
            return Err(self.too_many(model, u64::from(rows)));
        }
        if found_inputs < sent {
            return Err(self.wrong_inputs(model, &request.inputs));
        }
        if rows > 1 && found_inputs < self.inputs.len() {
            self.repeat_defaults(&request.inputs, rows, &mut inputs);
        }
        if rows == 0 {
            return self.standing_in(model, &shapes);
        }
        Ok(Admitted { inputs, shapes, rows, is_empty: false, about: self.about(request, left_out) })
    }

    /// The inputs that every request must have.
    fn required(&self) -> impl Iterator<Item = &TensorBinding> {
        let has_default = |place: usize| self.defaults.get(place).is_some_and(Option::is_some);
        let needed =
            move |(place, binding): &(usize, &TensorBinding)| !has_default(*place) && !self.may_be_missing(binding);
        self.inputs.iter().enumerate().filter(needed).map(|(_, binding)| binding)
    }

    /// Whether the model itself, or a model that the inputs go on to, sees that a request lacks an input.
    fn may_be_missing(&self, binding: &TensorBinding) -> bool {
        (self.takes_requests || self.passes_on) && binding.optional
    }

    /// Gives the inputs that a request leaves out their default value for each of its rows.
    fn repeat_defaults(&self, sent: &[InferTensor], rows: u32, inputs: &mut [Bytes]) {
        for ((binding, default), data) in self.inputs.iter().zip(&self.defaults).zip(inputs) {
            let is_left_out = !sent.iter().any(|input| input.name == binding.client.name);
            if let Some(default) = default.as_ref().filter(|_| is_left_out) {
                *data = default.item.repeat(rows as usize).into();
            }
        }
    }

    /// Whether an item of an input is one element, so that the sizes `[]` and `[1]` mean the same.
    fn is_single(&self, binding: &TensorBinding) -> bool {
        matches!(self.item_dims(&binding.client.dims), [] | [1])
    }

    /// Checks datatype and shape of an input. Returns its batch dimension.
    fn check_shape(&self, model: &str, binding: &TensorBinding, input: &InferTensor) -> Result<i64, ServiceError> {
        let spec = &binding.client;
        if input.datatype != spec.datatype {
            return Err(ServiceError::InvalidArgument(format!(
                "inference input '{}' data-type is '{}', but model '{model}' expects '{}'",
                spec.name, input.datatype, spec.datatype
            )));
        }
        let as_declared = input.shape.len() == spec.dims.len()
            && input.shape.iter().all(|d| *d >= 0)
            && spec.dims.iter().zip(&input.shape).all(|(want, got)| *want < 0 || want == got);
        let rows = if self.batched { input.shape.first().copied().unwrap_or(-1) } else { 1 };
        let as_single = || rows >= 0 && self.is_single(binding) && matches!(self.item_dims(&input.shape), [] | [1]);
        if !as_declared && !as_single() {
            return Err(ServiceError::InvalidArgument(format!(
                "unexpected shape for input '{}' for model '{model}'. Expected {}, got {}.{}",
                spec.name,
                show(&spec.dims),
                show(&input.shape),
                if self.batched { " (-1: any size; the first dimension is the batch)" } else { "" },
            )));
        }
        Ok(rows)
    }

    /// Checks an input. Returns its batch dimension.
    fn check_input(&self, model: &str, binding: &TensorBinding, input: &InferTensor) -> Result<u32, ServiceError> {
        let rows = self.check_shape(model, binding, input)?;
        let spec = &binding.client;
        let elements = input.shape.iter().try_fold(1u64, |product, d| product.checked_mul(*d as u64));
        let wrong_size = |expected: String| {
            ServiceError::InvalidArgument(format!(
                "input byte size mismatch for input '{}' for model '{model}'. Expected {expected}, got {} (shape {} of {})",
                spec.name,
                input.data.len(),
                show(&input.shape),
                spec.datatype
            ))
        };
        let Some(elements) = elements else {
            return Err(wrong_size("a shape with fewer elements".to_owned()));
        };
        match spec.datatype.size() {
            Some(size) => {
                let expected = elements.checked_mul(size as u64);
                if expected != Some(input.data.len() as u64) {
                    return Err(wrong_size(expected.map_or("less".to_owned(), |e| e.to_string())));
                }
            }
            None => {
                let counted = count_strings(&input.data);
                if counted != Some(elements) {
                    let found = counted.map_or("data that end inside an element".to_owned(), |n| n.to_string());
                    return Err(ServiceError::InvalidArgument(format!(
                        "expected {elements} string elements for inference input '{}' for model '{model}', got {found} (shape {}; \
                         each element is its length as a little-endian 32-bit number, then its bytes)",
                        spec.name,
                        show(&input.shape)
                    )));
                }
            }
        }
        u32::try_from(rows).map_err(|_| self.too_many(model, rows.unsigned_abs()))
    }

    fn too_many(&self, model: &str, rows: u64) -> ServiceError {
        ServiceError::InvalidArgument(format!(
            "inference request batch-size must be <= {} for '{model}': the request has {rows}; send several requests, \
             or raise max_batch_size in the model's config.pbtxt or --default-max-batch-size",
            self.max_batch
        ))
    }

    fn wrong_inputs(&self, model: &str, got: &[InferTensor]) -> ServiceError {
        let list = |names: &mut dyn Iterator<Item = &str>| {
            let names: Vec<String> =
                names.map(|name| format!("'{}'", name.chars().take(128).collect::<String>())).collect();
            format!("[{}]", names.join(","))
        };
        let wanted = || self.inputs.iter().map(|i| i.client.name.as_str());
        let got = || got.iter().map(|i| i.name.as_str());
        if let Some(unknown) = got().find(|name| !wanted().any(|wanted| wanted == *name)) {
            let hint = downbeat_repository::did_you_mean(unknown, wanted());
            return ServiceError::InvalidArgument(format!(
                "unexpected inference input '{}' for model '{model}'{hint}; its inputs are {}",
                unknown.chars().take(128).collect::<String>(),
                list(&mut wanted())
            ));
        }
        let required = || self.required().map(|binding| binding.client.name.as_str());
        let missing = list(&mut required().filter(|wanted| !got().any(|name| name == *wanted)));
        let expected = match (required().count(), self.inputs.len()) {
            (least, most) if least < most => format!("number of inputs between {least} and {most}"),
            (_, most) => format!("{most} inputs"),
        };
        ServiceError::InvalidArgument(format!(
            "expected {expected} but got {} inputs for model '{model}'. Got input(s) {}, but missing required input(s) \
             {missing}. Please provide all required input(s).",
            got().count(),
            list(&mut got()),
        ))
    }
}

/// The error of a request whose inputs have different batch dimensions.
fn different_rows(model: &str, input: &str, rows: u32, others: u32) -> ServiceError {
    ServiceError::InvalidArgument(format!(
        "input '{input}' batch size does not match other inputs for '{model}': this input has {rows}, another input \
         has {others}"
    ))
}

/// `[-1,3,224]`, as Triton writes sizes.
fn show(dims: &[i64]) -> String {
    let dims: Vec<String> = dims.iter().map(i64::to_string).collect();
    format!("[{}]", dims.join(","))
}

/// The number of length-prefixed elements in `data`; `None` if it ends inside an element.
fn count_strings(mut data: &[u8]) -> Option<u64> {
    let mut count = 0;
    while !data.is_empty() {
        let (length, rest) = data.split_first_chunk::<4>()?;
        data = rest.get(u32::from_le_bytes(*length) as usize..)?;
        count += 1;
    }
    Some(count)
}
